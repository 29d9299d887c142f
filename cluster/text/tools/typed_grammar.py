"""Grammars of arguments that are written as marked text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.json_schemas import json_rule
from cluster.text.tools.lark import Lark
from cluster.text.tools.schema_types import resolved, types_of
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
    required = tool.parameters.get("required") or ()
    members = []
    for number, (key, schema) in enumerate(properties.items()):
        name = f"argument_{index}_{number}"
        head = lark.marks(*style.before_key, key, *style.after_key)
        lark.rule(name, f"{head} {_value(lark, tool, schema, f'value_{index}_{number}', style)}")
        members.append(name if key in required else f"[{name}]")
    return " ".join(members)


def _value(lark: Lark, tool: Tool, schema: object, name: str, style: ValueStyle) -> str:
    target = resolved(schema["$ref"], tool.parameters) if isinstance(schema, Mapping) and "$ref" in schema else schema
    if isinstance(target, Mapping) and (choices := _choices(target)):
        texts = [lark.marks(text, *style.before_end, style.end, *style.after_value) for text in choices]
        return "(" + " | ".join(texts) + ")"
    after = lark.marks(*style.after_value) if style.after_value else ""
    if "string" in types_of(schema, tool.parameters):
        return f"{_any_value(lark, style)} {after}"
    rule = lark.shared_rule(name, json_rule(_alone(schema, tool.parameters), tool.strict))
    return f"{rule} {lark.marks(*style.before_end, style.end, *style.after_value)}"


def _alone(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a property as one of its own. Without what only describes it, more properties have the same."""
    known = schema if isinstance(schema, Mapping) else {}
    definitions = {word: root[word] for word in _DEFINITIONS if word in root} if '"$ref"' in json.dumps(known) else {}
    return {**definitions, **{word: value for word, value in known.items() if word not in _DESCRIPTIVE}}


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
