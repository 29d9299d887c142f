"""Where in a JSON schema is what llguidance refuses, which its messages do not say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from actors.grammar.schema_parts import SchemaPart, schema_parts

_Holds = Callable[[Any, str], bool]  # whether the value of a keyword is what a message complains of

_PLACE = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: ")

# What a message says, the keyword (None: the first group), and whether that keyword's value is the last group.
_COMPLAINTS: tuple[tuple[re.Pattern[str], str | None, _Holds], ...] = (
    (re.compile(r'Unimplemented keys: \["([^"]+)"'), None, lambda value, key: True),
    (
        re.compile(r"^Expected .+ for '(\w+)'(?: item)?, got (.+)"),
        None,
        lambda value, got: got in map(json.dumps, [value, *_listed(value)]),
    ),
    (re.compile(r"^(\$?\w+) must be an? "), None, lambda value, key: not isinstance(value, (dict, list))),
    (re.compile(r"Invalid type: (.+)"), "type", lambda value, name: value == name or name in _listed(value)),
    (re.compile(r"Unknown format: (.+)"), "format", lambda value, name: value == name),
    (re.compile(r"Pointer '(.*)' does not exist"), "$ref", lambda value, to: _text(value) in (f"#{to}", to)),
    (re.compile(r"Resource '(.*)' is not present"), "$ref", lambda value, to: _text(value).startswith(to)),
    (re.compile(r"regex parse error:\n +(.+)"), "pattern", lambda value, pattern: value == pattern),
)


@dataclass(frozen=True, slots=True)
class RefusedKeyword:
    """A keyword of a schema, the schema that has it, and its value."""

    part: SchemaPart
    keyword: str

    @property
    def value(self) -> Any:
        return self.part.schema[self.keyword]


def schema_of(grammar: str) -> dict[str, Any] | None:
    """The JSON schema that a grammar in llguidance's format consists of; None: it is of another kind."""
    try:
        grammars = json.loads(grammar)["grammars"]
        (only,) = grammars
        schema = only["json_schema"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return schema if isinstance(schema, dict) else None


def schema_within(grammar: str, problem: str) -> dict[str, Any] | None:
    """The JSON schema in a grammar in Lark's notation that a message of llguidance is about, by the line that it names.
    None: it names none with a schema."""
    found = _PLACE.match(problem.strip())
    lines = grammar.split("\n")
    if found is None or int(found[1]) > len(lines):
        return None
    _, is_json, rest = lines[int(found[1]) - 1].partition("%json ")
    try:
        schema = json.JSONDecoder().raw_decode(rest)[0] if is_json else None
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict) else None


def refused_keyword(problem: str, schema: dict[str, Any]) -> RefusedKeyword | None:
    """What a message of llguidance is about. None: it does not tell, or nothing in the schema is like it."""
    return next(_candidates(_PLACE.sub("", problem.strip(), count=1), schema), None)


def _candidates(problem: str, schema: dict[str, Any]) -> Iterator[RefusedKeyword]:
    for pattern, keyword, holds in _COMPLAINTS:
        if found := pattern.search(problem):
            name = keyword or found[1]
            for part in schema_parts(schema):
                if name in part.schema and holds(part.schema[name], found[pattern.groups]):
                    yield RefusedKeyword(part, name)
    if "oneOf" in problem:
        options = [part for part in schema_parts(schema) if "oneOf" in part.schema]
        if len(options) == 1:  # of several, some may be exclusive
            yield RefusedKeyword(options[0], "oneOf")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return unquote(value) if isinstance(value, str) else ""
