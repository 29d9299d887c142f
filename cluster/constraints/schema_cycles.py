"""Finds JSON schemas that need themselves, so that no answer that follows them has an end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from actors.errors import InvalidRequest, Size
from actors.grammar.schema_parts import SchemaPart


def check_has_ends(schema: Mapping[str, Any], parts: Sequence[SchemaPart], field: str) -> None:
    """Raises InvalidRequest if a part of the schema needs itself: a model would write forever, or be stuck. parts: all
    of the schema."""
    is_done: dict[int, bool] = {}  # by id; False: on the path
    waiting: list[tuple[Any, bool]] = [(part, False) for part in _referenced(schema)]
    while waiting:
        part, is_over = waiting.pop()
        if is_over:
            is_done[id(part)] = True
        elif id(part) not in is_done:
            is_done[id(part)] = False
            waiting.append((part, True))
            for needed in _needed_by(part, schema):
                if is_done.get(id(needed)) is False:
                    limit = "a part of it needs itself, so that no answer ends; make it optional or one of several"
                    place = next((one.place(field) for one in parts if one.schema is needed), field)
                    raise InvalidRequest(place, Size("circular"), limit)
                waiting.append((needed, False))


def _referenced(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Targets of references within the schema: every circle has one."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += [one for one in part if isinstance(one, (dict, list))]
        elif isinstance(part, dict):
            waiting += part.values()
            target = _target(part.get("$ref"), schema)
            if target is not None:
                yield target


def _needed_by(part: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Schemas that every answer to this one follows, too, as a whole or in a part."""
    found = [_target(part.get("$ref"), root), *_listed(part, "allOf")]
    for keyword in ("anyOf", "oneOf"):
        options = _listed(part, keyword)
        found += options if len(options) == 1 else []
    if part.get("type") == "object":
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            found += [properties.get(key) for key in required if isinstance(key, str)]
    least = part.get("minItems", 0)
    if part.get("type") == "array" and isinstance(least, int) and least > 0:
        first = _listed(part, "prefixItems")
        found += first[:least]
        if least > len(first):
            found.append(part.get("items"))
    return (needed for needed in found if isinstance(needed, Mapping))


def _listed(part: Mapping[str, Any], keyword: str) -> list[Any]:
    found = part.get(keyword)
    return found if isinstance(found, list) else []


def _target(reference: object, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a reference within the document names; None: something else, which llguidance refuses."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, Mapping):
            found = found.get(key)
        else:
            return None
    return found if isinstance(found, Mapping) else None
