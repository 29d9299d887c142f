"""Makes JSON of arguments that are written as marked text: strings as they are, other values as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cluster.text.tools.json_scanner import JsonScanner
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Marks, Reader, Steps
from cluster.text.tools.schema_types import ALL_TYPES, type_of_text, types_of

_STRING = frozenset(("string",))
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}


class TypedArguments:
    """The arguments of one call that has begun. Strings are passed on as they come, other values when they are
    whole."""

    def __init__(self, reader: Reader, output: Output, schema: Mapping[str, Any]) -> None:
        self._reader = reader
        self._output = output
        self._schema = schema
        self._has_members = False
        output.arguments("{")

    def close(self) -> None:
        self._output.arguments("}")

    def read_value(self, key: str, end: Marks) -> Steps[bool]:
        """A member, whose value goes up to a mark; whether the mark has come."""
        self._output.arguments((", " if self._has_members else "") + _quoted(key) + ": ")
        self._has_members = True
        allowed = self._types(key)
        if allowed == _STRING:
            self._output.arguments('"')
            found = yield from self._reader.text_until(end, lambda text: self._output.arguments(_quoted(text)[1:-1]))
            if found:
                self._output.arguments('"')
        else:
            pieces: list[str] = []
            found = yield from self._reader.text_until(end, pieces.append)
            text = "".join(pieces)
            self._output.arguments(_value(text, allowed) if found else _cut_value(text, allowed))
        self._reader.commit()
        return found is not None

    def _types(self, key: str) -> frozenset[str]:
        properties = self._schema.get("properties")
        if not isinstance(properties, Mapping) or key not in properties:
            return ALL_TYPES
        return types_of(properties[key], self._schema)


def _value(text: str, allowed: frozenset[str]) -> str:
    """A value that is JSON of an allowed type is that, another one a string. Nothing is lost where a model breaks the
    schema."""
    stripped = text.strip()
    stripped = _PYTHON_LITERALS.get(stripped, stripped)
    scanner = JsonScanner()
    end, passed = scanner.scan(stripped)
    scanner.end()
    if not scanner.is_complete or end < len(stripped):
        return _quoted(text)
    kind = type_of_text(passed)
    is_allowed = kind in allowed or (kind == "integer" and "number" in allowed) or "string" not in allowed
    return passed if is_allowed else _quoted(text)


def _cut_value(text: str, allowed: frozenset[str]) -> str:
    """The beginning of a value that the end of the answer has cut off, as JSON text."""
    return _quoted(text)[:-1] if "string" in allowed else JsonScanner().scan(text.lstrip())[1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
