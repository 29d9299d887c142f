"""Grammars of arguments that are written as marked text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.constraints.json_schemas import json_rule
from cluster.text.tools.lark import Lark, Plain
from cluster.text.tools.schema_types import resolved, types_of, unescaped
from cluster.text.tools.tool import Tool

_DEFINITIONS = ("$defs", "definitions")
_DESCRIPTIVE = frozenset(("description", "title", "default", "examples"))


@dataclass(frozen=True, slots=True)
class ValueStyle:
    """Marks and texts of one argument: before_key, the key, after_key, the value, before_end, end, after_value. Where a
    value may be any text, before_end may be missing."""

    before_key: tuple[str, ...]
    after_key: tuple[str, ...]
    end: str  # the first one ends the value
    before_end: tuple[str, ...] = ()
    after_value: tuple[str, ...] = ()


def typed_members(lark: Lark, tool: Tool, index: int, style: ValueStyle) -> str:
    """Expression of the arguments of a tool, in the order of its schema; those that are not required may be missing.
    Values that may be strings are any text, or one of an enumeration. index: of the tool, for names of rules."""
    properties = tool.parameters.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return "" if properties is not None else _any_members(lark, style)
    required = tool.parameters.get("required")
    needed = {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()
    members = []
    values: dict[str, str] = {}  # expressions by schemas: each is made once
    for number, (key, schema) in enumerate(properties.items()):
        name = f"argument_{index}_{number}"
        plain = _undescribed(schema)
        text = json.dumps(plain)
        if text not in values:
            values[text] = _value(lark, tool, plain, f"value_{index}_{number}", style)
        head = lark.marks(*style.before_key, Plain(key), *style.after_key)
        lark.rule(name, f"{head} {values[text]}")
        members.append(name if key in needed else f"[{name}]")
    return " ".join(members)


def _value(lark: Lark, tool: Tool, schema: Mapping[str, Any], name: str, style: ValueStyle) -> str:
    target = resolved(schema["$ref"], tool.parameters) if "$ref" in schema else schema
    if isinstance(target, Mapping) and (choices := _choices(target)):
        texts = [lark.marks(Plain(text), *style.before_end, style.end, *style.after_value) for text in choices]
        return "(" + " | ".join(texts) + ")"
    after = lark.marks(*style.after_value) if style.after_value else ""
    if "string" in types_of(schema, tool.parameters):
        return f"{_any_value(lark, style)} {after}"
    rule = lark.shared_rule(name, json_rule({**_definitions(schema, tool.parameters), **schema}, tool.strict))
    return f"{rule} {lark.marks(*style.before_end, style.end, *style.after_value)}"


def _undescribed(schema: object) -> dict[str, Any]:
    """Without what only describes it, more properties have the same schema."""
    known = schema if isinstance(schema, Mapping) else {}
    return {word: value for word, value in known.items() if word not in _DESCRIPTIVE}


def _definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The root's definitions that references in a schema lead to."""
    found: dict[str, dict[str, Any]] = {}
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, Mapping):
            waiting += part.values()
            reference = part.get("$ref")
            word, name = _place(reference) if isinstance(reference, str) else ("", "")
            definitions = root.get(word) if word in _DEFINITIONS else None
            if isinstance(definitions, Mapping) and name in definitions and name not in found.get(word, {}):
                found.setdefault(word, {})[name] = definitions[name]
                waiting.append(definitions[name])
    return found


def _place(reference: str) -> tuple[str, str]:
    """("$defs", "x") for the reference #/$defs/x and references below it."""
    start, word, name, *_ = [*reference.split("/", 3), "", "", ""]
    return (word, unescaped(name)) if start == "#" else ("", "")


def _choices(schema: Mapping[str, Any]) -> list[str]:
    """The values of an enumeration, as they are written."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return []
    return [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]


def _any_value(lark: Lark, style: ValueStyle) -> str:
    return lark.text_up_to("any_value", style.end)


def _any_members(lark: Lark, style: ValueStyle) -> str:
    before, between = lark.marks(*style.before_key), lark.marks(*style.after_key)
    after = lark.marks(*style.after_value) if style.after_value else ""
    lark.rule("any_argument", f"{before} /[A-Za-z0-9_.-]{{1,64}}/ {between} {_any_value(lark, style)} {after}")
    return "any_argument*"
