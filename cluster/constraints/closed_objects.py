"""Closes the objects of a JSON schema, so that an answer has no keys that the schema does not describe.

A schema that leaves out `additionalProperties` allows any others, and most libraries that make schemas from classes
leave it out. A small model then adds keys until `max_tokens` ends its answer. What follows the closed schema follows
the open one as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from actors.grammar.schema_parts import schema_parts

# Where these are, a narrower part of a schema can make the whole wider, or leave nothing that follows it.
_MIXING = frozenset(
    ("oneOf", "not", "if", "contains", "dependentSchemas", "dependencies", "unevaluatedProperties", "$dynamicRef")
)
_MERGED = frozenset(("$ref", "anyOf", "allOf"))  # with what stands beside them
_OPENING = frozenset(("additionalProperties", "minProperties", "dependentRequired"))


def with_closed_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in each object that has properties and does not say; unchanged
    where parts of it are combined in a way that closing could break."""
    closed: dict[str, Any] = json.loads(json.dumps(schema))
    parts = [part.schema for part in schema_parts(closed)]
    if any(map(_mixes, parts)):
        return closed
    for part in parts:
        properties = part.get("properties")
        if not isinstance(properties, dict) or not properties or _OPENING & part.keys():
            continue
        required = part.get("required", ())
        if isinstance(required, (list, tuple)) and all(key in properties for key in required if isinstance(key, str)):
            part["additionalProperties"] = False
    return closed


def _mixes(part: Mapping[str, Any]) -> bool:
    branches = part.get("allOf", ())
    return (
        bool(_MIXING & part.keys())
        or (isinstance(branches, list) and len(branches) > 1)
        or len(_MERGED & part.keys()) > 1
        or ("properties" in part and bool((_MERGED | {"patternProperties"}) & part.keys()))
    )
