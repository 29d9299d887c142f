"""Requests whose constraints try to stall, crash or fool a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Body = dict[str, Any]

_INJECTIONS = ('"} | /.*/', "\n%ignore /x/\nstart: /.*/", "%json {}", "@said", "<[256]>", "\\", "\x00", "#", "//", "/")

_COUNTS = {
    "maxLength": "string", "minLength": "string", "maxItems": "array", "minItems": "array", "minProperties": "object",
    "maxProperties": "object",
}  # fmt: skip
_PATTERNS = (
    "(a{1000}){1000}", "^(a+)+$", "^(([a-z])+.)+[A-Z]([a-z])+$", "(.*a){25}", "(x+x+)+y", "^.{1,60000}$", "a" * 200_000,
    "(?:" * 3_000 + "a" + ")" * 3_000, "[", "(?=a)", r"\p{L}{1,5000}", "(a|ab|abc){500}(b|bc){500}",
)  # fmt: skip


def hostile_requests() -> Iterator[tuple[str, str | Body]]:
    """Pairs (name, body of a chat completion). A text is a body that Python's json does not write."""
    for name, schema in _schemas():
        yield f"schema: {name}", {"structured_outputs": {"json": schema}}
    for name, constraint in _constraints():
        yield name, {"structured_outputs": constraint}
    for index, text in enumerate(_INJECTIONS):
        properties = {text: {"const": text, "description": text, "title": text}}
        schema = {"type": "object", "properties": properties, "required": [text], "additionalProperties": False}
        tool = {"name": "f", "description": text, "parameters": schema, "strict": True}
        yield f"injection {index}", {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
        named = {"type": "function", "function": {"name": text}}
        yield f"name of a function {index}", {"tools": [named], "tool_choice": "required"}
        mark = {"begin": f"<{text}", "schema": schema, "end": text}
        yield (
            f"mark {index}",
            {"structured_outputs": {"structural_tag": {"structures": [mark], "triggers": [f"<{text}"]}}},
        )
    tool = {"name": "f", "parameters": {"x-guidance": {"item_separator": "x", "lenient": True}}, "strict": True}
    yield "x-guidance of a tool", {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    yield "surrogate", '{"structured_outputs": {"choice": ["\\ud800"]}}'
    yield "surrogate in a schema", '{"structured_outputs": {"json": {"const": "\\ud800"}}}'
    yield (
        "surrogate in a tool",
        (
            '{"tools": [{"type": "function", "function": {"name": "f", "strict": true, "parameters": '
            '{"properties": {"\\udfff": {"type": "string"}}, "required": ["\\udfff"]}}}], "tool_choice": "required"}'
        ),
    )
    deep = '{"items":' * 10_000 + "{}" + "}" * 10_000
    yield "nested as an object", f'{{"structured_outputs": {{"json": {deep}}}}}'
    yield "NaN", '{"structured_outputs": {"json": {"minimum": NaN}}}'
    yield "huge number", '{"structured_outputs": {"json": {"minimum": 1e999, "maxLength": 1e999}}}'


def _schemas() -> Iterator[tuple[str, Any]]:
    yield "nested", '{"items":' * 10_000 + "{}" + "}" * 10_000
    yield "nested a little", json.dumps(_nested(16))
    yield "large enum", {"enum": [f"value {index}" for index in range(15_000)]}
    yield "enum of 100,000", {"enum": list(range(100_000))}
    yield "many properties", {"properties": {f"p{index}": {"type": "integer"} for index in range(8_000)}}
    yield "many required", {"required": [f"p{index}" for index in range(20_000)]}
    for keyword, kind in _COUNTS.items():
        for size in (2**31, 2**53, 10**30):
            yield f"{keyword} {size}", {"type": kind, keyword: size}
    yield "long string", {"type": "string", "minLength": 20_000, "maxLength": 100_000, "pattern": "^(a|b)*c(a|b)*$"}
    for pattern in _PATTERNS:
        yield f"pattern {pattern[:20]}", {"type": "string", "pattern": pattern}
    both = {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}}
    for keyword in ("anyOf", "allOf", "oneOf"):
        schema: Any = both
        for _ in range(14):
            schema = {keyword: [schema, schema]}
        yield f"doubled {keyword}", json.dumps(schema)
    yield "product", {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(8)]} for i in range(8)]}
    yield "nowhere", {"$ref": "#/$defs/none"}
    yield "web", {"$ref": "http://127.0.0.1:9/schema.json"}
    yield "file", {"$ref": "file:///etc/passwd"}
    yield "itself", {"$ref": "#"}
    yield "circle", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    yield "endless", {"$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
                      "$ref": "#/$defs/a"}  # fmt: skip
    yield "left recursion", {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": 1}]}}, "$ref": "#/$defs/a"}
    definitions = {f"d{index}": {"allOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(40)}
    yield "doubling references", {"$defs": {**definitions, "d40": {"type": "object"}}, "$ref": "#/$defs/d0"}
    yield "multipleOf", {"type": "integer", "multipleOf": 9_999_991}
    yield "range", {"type": "number", "minimum": 1e-300, "maximum": 1e300}
    yield "nothing", {"type": "string", "minLength": 2, "maxLength": 1}
    yield "false", {"not": {}}
    yield "lenient", {"x-guidance": {"lenient": True}, "type": "integer", "not": {"const": 1}}
    yield "separator", {"x-guidance": {"item_separator": "; DROP"}, "type": "array"}


def _nested(depth: int) -> Body:
    schema: Body = {"type": "object", "properties": {"a": {"type": "string"}}}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema["properties"]["a"]}, "required": ["a"]}
    return schema


def _constraints() -> Iterator[tuple[str, Body]]:
    yield "no choice", {"choice": []}
    yield "empty choice", {"choice": [""]}
    yield "many choices", {"choice": [f"{index}" * 20 for index in range(4_000)]}
    yield "choice that is grammar", {"choice": ['" | /.*/ | "', "\n", "\\", "\x00", "<[1]>", "%ignore"]}
    yield "regex", {"regex": "((a{1000}){1000}){1000}"}
    yield "regex of alternatives", {"regex": "(" + "|".join(f"a{{{n}}}b" for n in range(1, 3_000)) + ")*"}
    yield "lark of 256 KB", {"grammar": "start: " + " | ".join(f'"{index:05}"' for index in range(26_000))}
    yield (
        "lark of rules",
        {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(9_000)) + 'r9000: "a"'},
    )
    yield "lark that is ambiguous", {"grammar": 'start: start start | "a" | "a" "a" | '}
    yield "lark that is slow behind some tokens", {"grammar": "start: e\ne: /[a-z]/ | e e | e e e"}
    yield "regex of many states", {"regex": "(.*a.{30}|.*b.{29}|.*c.{28})x"}
    yield "lark without words", {"grammar": "start: start"}
    yield "lark, empty", {"grammar": 'start: ("")*'}
    yield "lark lines", {"grammar": "\n" * 250_000 + 'start: "a"'}
    yield "lark import", {"grammar": "%import .../etc/passwd\nstart: x"}
    yield "lark token", {"grammar": "start: <[99999999]> <|none|>"}
    yield "gbnf", {"grammar": "root ::= " + "(" * 3_000 + '"a"' + ")" * 3_000}
    yield "gbnf repeats", {"grammar": 'root ::= (("a"{1000}){1000}){1000}'}
    yield (
        "gbnf rules",
        {"grammar": "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(600)) + 'a600 ::= "x"'},
    )
    one = {"begin": "<f>", "schema": {}, "end": ""}
    yield "tag of many", {"structural_tag": {"structures": [one] * 129, "triggers": ["<"]}}
    marks = [f"<{index:03}>" for index in range(128)]
    many = [{**one, "begin": mark} for mark in marks]
    yield "tag of 128 triggers", {"structural_tag": {"structures": many, "triggers": marks}}
    yield (
        "tag of long triggers",
        {"structural_tag": {"structures": [{**one, "begin": "ab" * 500}], "triggers": ["ab" * 500]}},
    )
    yield "tag as a bomb", {"structural_tag": "[" * 200_000}
