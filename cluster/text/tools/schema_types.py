"""Which JSON types a schema allows, for formats that write strings without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALL_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))
_MOST_STEPS = 16  # of references and alternatives


def types_of(schema: object, root: Mapping[str, Any], steps: int = _MOST_STEPS) -> frozenset[str]:
    """All types for what cannot be told. root: the schema that local references begin at."""
    if not isinstance(schema, Mapping) or steps == 0:
        return ALL_TYPES
    if "$ref" in schema:
        return types_of(resolved(schema["$ref"], root), root, steps - 1)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset((kinds,)) & ALL_TYPES or ALL_TYPES
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str)) & ALL_TYPES or ALL_TYPES
    if "const" in schema:
        return frozenset((type_of_value(schema["const"]),))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of_value, schema["enum"]))
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and branches:
            return frozenset().union(*(types_of(branch, root, steps - 1) for branch in branches[:_MOST_STEPS]))
    return ALL_TYPES


def resolved(reference: object, root: Mapping[str, Any]) -> object:
    """What a local reference (#/$defs/x) stands for; None for others."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: object = root
    for part in reference[2:].split("/"):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found


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
