"""Which JSON types a schema allows, for formats that write strings without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALL_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))
_MOST_STEPS = 256  # references and alternatives


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """All types for what cannot be told. root: the schema that local references begin at."""
    found: set[str] = set()
    followed: set[str] = set()
    waiting = [schema]
    for _ in range(_MOST_STEPS):
        if not waiting:
            return frozenset(found) or ALL_TYPES
        part = waiting.pop()
        if not isinstance(part, Mapping):
            return ALL_TYPES
        reference = part.get("$ref")
        branches = _branches(part)
        if isinstance(reference, str):
            if reference not in followed:
                followed.add(reference)
                waiting.append(resolved(reference, root))
        elif branches:
            waiting += branches
        else:
            found |= _own_types(part)
    return ALL_TYPES


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset((kinds,)) & ALL_TYPES or ALL_TYPES
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str)) & ALL_TYPES or ALL_TYPES
    if "const" in schema:
        return frozenset((type_of_value(schema["const"]),))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of_value, schema["enum"]))
    return ALL_TYPES


def _branches(schema: Mapping[str, Any]) -> list[object]:
    """Alternatives, in a schema that does not say its types otherwise."""
    if isinstance(schema.get("type"), (str, list)) or "const" in schema or isinstance(schema.get("enum"), list):
        return []
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and branches:
            return branches
    return []


def resolved(reference: object, root: Mapping[str, Any]) -> object:
    """What a local reference (#/$defs/x) stands for; None for others."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: object = root
    for part in reference[2:].split("/"):
        if not isinstance(found, Mapping):
            return None
        found = found.get(unescaped(part))
    return found


def unescaped(part: str) -> str:
    """One part of a JSON pointer."""
    return part.replace("~1", "/").replace("~0", "~")


def type_of_value(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    for python, name in ((str, "string"), (int, "integer"), (float, "number"), (list, "array"), (Mapping, "object")):
        if isinstance(value, python):
            return name
    return "null"


def type_of_text(text: str) -> str:
    """The type of valid JSON text."""
    kinds = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    return kinds.get(text[0], "integer" if text.lstrip("-").isdigit() else "number")
