"""Numbers of JSON schemas that llguidance, which computes with 64-bit floats, does not keep exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from actors.errors import InvalidRequest
from actors.grammar.schema_parts import SchemaPart

_MOST_EXACT = 1 << 53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COMBINING = ("$ref", "anyOf", "oneOf")


def check_exact_numbers(part: SchemaPart, field: str) -> None:
    """Raises InvalidRequest for a number beyond 2 ** 53."""
    limit = f"numbers beyond {_MOST_EXACT} are not exact; leave it out, or take a string"
    for keyword in ("const", "enum"):
        for number in leaves(part.schema[keyword]) if keyword in part.schema else ():
            if isinstance(number, (int, float)) and abs(number) > _MOST_EXACT:
                raise InvalidRequest(part.place(field, keyword), number, limit, "unsupported_value")
    for keyword in _BOUNDS:
        bound = part.schema.get(keyword)
        if isinstance(bound, int) and abs(bound) + keyword.startswith("exclusive") > _MOST_EXACT:
            raise InvalidRequest(part.place(field, keyword), bound, limit, "unsupported_value")


def check_open_ranges(parts: Sequence[SchemaPart], field: str) -> None:
    """Raises InvalidRequest for a range between a whole number, itself excluded, and a fraction less than 1 away:
    the grammar would have the whole number. Schemas that are combined are taken as one."""
    bounded = [part for part in parts if any(keyword in part.schema for keyword in _BOUNDS)]
    for group in [bounded] if any(_combines(part.schema) for part in parts) else [[part] for part in bounded]:
        for excluded, others, sign in (
            ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
            ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
        ):
            whole = {bound for bound, *_ in _bounds(group, (excluded,)) if bound == math.floor(bound)}
            for bound, keyword, part in _bounds(group, others):
                if bound != math.floor(bound) and sign * math.floor(sign * bound) in whole:
                    limit = f"{excluded} cannot be followed with it, less than 1 away; move one of them"
                    raise InvalidRequest(part.place(field, keyword), bound, limit, "unsupported_value")


def _combines(part: Mapping[str, Any]) -> bool:
    return "allOf" in part or (any(map(part.__contains__, _BOUNDS)) and any(map(part.__contains__, _COMBINING)))


def _bounds(parts: Sequence[SchemaPart], keywords: Sequence[str]) -> Iterator[tuple[float, str, SchemaPart]]:
    """Finite bounds of numbers that need not be whole, with their keywords."""
    for part in parts:
        for keyword in keywords if part.schema.get("type") != "integer" else ():
            bound = part.schema.get(keyword)
            if isinstance(bound, (int, float)) and math.isfinite(bound):
                yield bound, keyword, part


def leaves(value: Any) -> Iterator[Any]:
    """All strings, numbers and so on of a JSON value, without keys."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):  # as JSON is read; asking for a Mapping takes longer than all else
            waiting += part.values()
        else:
            yield part
