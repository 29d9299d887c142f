"""What schemas promise that llguidance alone does not keep."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actors.errors import InvalidRequest
from actors.grammar.grammars import Grammars
from cluster.constraints.json_schemas import MAX_PARTS, check_schema, json_rule
from cluster.constraints.structured_outputs import StructuredOutputs
from paceline_testing.tiny_models import BYTE_VOCAB_SIZE, make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
GRAMMARS = Grammars(make_byte_tokenizer, BYTE_VOCAB_SIZE, [TOKENIZER.eos_token_id], "bytes")
ONE_IS_NULL = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True}


def follows(grammar: str, text: str) -> bool:
    matcher = GRAMMARS.matcher(grammar)
    return matcher.follow(TOKENIZER.encode(text, add_special_tokens=False)) and (
        matcher.is_complete or TOKENIZER.eos_token_id in matcher.allowed_tokens()
    )


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("escape", ["\\u0061", "\\u0041", "\\n\\u0061"])
def test_no_escape_spells_the_name_of_a_property_anew(escape: str, strict: bool) -> None:
    text = f'{{"{escape}": 1}}'
    assert not follows(StructuredOutputs(json_schema=ONE_IS_NULL).grammar_text("f"), text)
    assert not follows(f"start: {json_rule(ONE_IS_NULL, strict)}", text)
    assert follows(f"start: {json_rule(ONE_IS_NULL, strict)}", '{"a": null, "b\\n": 1}')


@pytest.mark.parametrize(
    ("schema", "field", "reason"),
    [
        ({"x-guidance": {"lenient": True}}, "f.x-guidance", "no keyword of JSON schemas"),
        ({"minProperties": 2}, "f.minProperties", "number of required properties, which is 0"),
        ({"$defs": {"default": {"required": ["a"], "minProperties": 3}}}, "f.$defs.default.minProperties", "is 1"),
        ({"required": ["a", "a"], "minProperties": 3}, "f.minProperties", "which is 1"),
        ({"x": [{"y": {"minProperties": 2}}]}, "f.x[0].y.minProperties", "at most 1 more"),
        ({"items": {"const": {"a": ["\x01"]}}}, "f.items.const", "control character"),
        ({"enum": ["a", "\x7f"]}, "f.enum", "control character"),
        ({"pattern": "a\x00"}, "f.pattern", "control character"),
        ({"pattern": r"^\u001B$"}, "f.pattern", "control character"),
        ({"pattern": r"[^x]\x7f"}, "f.pattern", "control character"),
        ({"pattern": r"[\x01]"}, "f.pattern", "control character"),
        ({"enum": [[2**53 + 1]]}, "f.enum", "not exact"),
        ({"const": 1e30}, "f.const", "not exact"),
        ({"maximum": 2**63 - 1}, "f.maximum", "not exact"),
        ({"exclusiveMinimum": 2**53}, "f.exclusiveMinimum", "not exact"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "f.maximum", "less than 1 away"),
        ({"exclusiveMaximum": -1, "minimum": -1.5}, "f.minimum", "less than 1 away"),
        ({"allOf": [{"exclusiveMinimum": 9}, {"exclusiveMaximum": 9.25}]}, "f.allOf[1].exclusiveMaximum", "1 away"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "f.$defs.a", "needs itself"),
        ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}, "f", "needs itself"),
        ({"x": {"a/b": {"type": "array", "minItems": 1, "items": {"$ref": "#/x/a~1b"}}}}, "f.x.a/b", "needs itself"),
        ({"patternProperties": {r"\cA": {}}}, "f.patternProperties", "control character"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(schema: dict[str, Any], field: str, reason: str) -> None:
    for given in (schema, json.dumps(schema)):
        with pytest.raises(InvalidRequest, match=reason) as error:
            StructuredOutputs(json_schema=given).grammar_text("f")
        assert error.value.field == field


def within(part: object) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"items": part}, "b": {"enum": [{"not": 1}]}}}


@pytest.mark.parametrize(
    ("part", "place", "told"),
    [
        ({"not": {"type": "null"}}, "not", "is given; .*not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "is true; .*uniqueItems"),
        ({"type": "strin"}, "type", "is 'strin'; "),
        ({"type": ["null", "strin"]}, "type", "strin"),
        ({"type": "string", "format": "colour"}, "format", "is 'colour'; "),
        ({"$ref": "#/$defs/none"}, "$ref", "is '#/\\$defs/none'; "),
        ({"$ref": "http://a.example/b"}, "$ref", "is 'http://a.example/b'; "),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern", "look-around"),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf", "is given; "),
        ({"properties": 3}, "properties", "is 3; "),
        ({"type": "number", "maximum": None}, "maximum", "Expected a number for 'maximum', got null"),
        ({"items": {"required": ["a"]}, "required": ["b", 5]}, "required", "got 5"),
        ({"items": {"maxLength": 3}, "maxLength": 1.5}, "maxLength", "is 1.5; "),
        ({"$ref": 5}, "$ref", "is 5; "),
    ],
)
def test_what_cannot_be_compiled_is_named_with_its_place(part: dict[str, Any], place: str, told: str) -> None:
    grammar = StructuredOutputs(json_schema=within(part)).grammar_text("f")
    for _ in range(2):  # the second time it is known
        with pytest.raises(InvalidRequest, match=told) as error:
            GRAMMARS.matcher(grammar, "f")
        assert error.value.field == f"f.properties.a.items.{place}"
        assert "it cannot be compiled: " in str(error.value)


def test_a_property_with_the_name_of_a_keyword_is_not_blamed() -> None:
    schema = {"properties": {"not": {"type": "null"}, "a": {"not": {}}}}
    with pytest.raises(InvalidRequest) as error:
        GRAMMARS.matcher(StructuredOutputs(json_schema=schema).grammar_text("f"), "f")
    assert error.value.field == "f.properties.a.not"


def test_a_schema_among_others_in_a_grammar_is_named_with_its_place() -> None:
    rules = [f"a_{index}: {json_rule(within(part), True)}" for index, part in enumerate(({}, {"not": {}}))]
    for before in ("", "%llguidance {}\n"):
        with pytest.raises(InvalidRequest, match="Unimplemented keys") as error:
            GRAMMARS.matcher(before + "\n".join([*rules, "start: a_0 | a_1"]), "tools")
        assert error.value.field == "tools"
        assert str(error.value).endswith("(schema.properties.a.items.not)")


def test_places_are_short() -> None:
    schema: dict[str, Any] = {"not": {}}
    for _ in range(30):
        schema = {"properties": {"x" * 1000: schema}}
    with pytest.raises(InvalidRequest) as error:
        GRAMMARS.matcher(StructuredOutputs(json_schema=schema).grammar_text("f"), "f")
    assert error.value.field.startswith("f...")
    assert error.value.field.endswith(".not")
    assert len(str(error.value)) < 1500


@pytest.mark.parametrize(
    "schema",
    [
        {"minProperties": 1},
        {"required": ["a", "b"], "minProperties": 3},
        {"properties": {"minProperties": {"type": "integer"}, "x-guidance": {}}},
        {"const": {"minProperties": 7, "\x01": 1}},
        {"enum": ['\b\t\n\f\r"\\']},
        {"pattern": r"^[^\x00-\x1f\x7f]+\n\x41\u0061\\x01\x0a$"},
        {"properties": {"bell\x07": {}}},
        {"const": 2**53, "minimum": -(2**53), "exclusiveMaximum": 2**53 - 1},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"exclusiveMinimum": 0.5, "maximum": 0.75},
        {"properties": {"a": {"exclusiveMinimum": 0}, "b": {"maximum": 0.5}}},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"anyOf": [{"$ref": "#"}, {}]}}, "required": ["b"]},
    ],
)
def test_what_can_be_followed_is_taken(schema: dict[str, Any]) -> None:
    check_schema(schema, "f")


def test_a_schema_may_be_nested_deeply() -> None:
    deep: dict[str, Any] = {"minProperties": 2}
    for _ in range(MAX_PARTS - 1):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="minProperties"):
        check_schema(deep, "f")
    while deep:  # Python's own destructor would run out of stack
        deep = deep.pop("items", {})


@pytest.mark.parametrize(("more", "is_taken"), [(0, True), (1, False)])
def test_a_schema_of_too_many_schemas_is_refused_before_anything_is_looked_at(more: int, is_taken: bool) -> None:
    properties = {f"p{index}": {"type": "integer"} for index in range(MAX_PARTS - 1 + more)}
    schema = {"properties": properties, "const": "\x00"}  # which is refused as well
    with pytest.raises(InvalidRequest, match="control character" if is_taken else "at most 5000 schemas") as error:
        check_schema(schema, "schema")
    assert error.value.field == ("schema.const" if is_taken else "schema")
