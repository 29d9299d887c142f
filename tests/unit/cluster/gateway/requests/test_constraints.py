"""Constraints of an answer by the names of OpenAI and vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actors.errors import InvalidRequest
from cluster.constraints.structured_outputs import StructuredOutputs
from cluster.gateway.requests.chat_schema import ChatBody, chat_call
from cluster.gateway.requests.schema import CompletionBody, completion_call, parse_fields
from cluster.text.chat_format import ChatFormat
from paceline_testing.toy_tokenizer import toy_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
CHAT_FORMAT = ChatFormat(toy_tokenizer())
MESSAGES = [{"role": "user", "content": "hi"}]


def call_of(**fields: Any) -> tuple[StructuredOutputs | None, str]:
    call = chat_call(parse_fields(ChatBody, {"messages": MESSAGES, **fields}), CHAT_FORMAT, None)
    body = parse_fields(CompletionBody, {"prompt": "hi", **fields})
    assert completion_call(body, None, None).options.structured_outputs == call.options.structured_outputs
    return call.options.structured_outputs, call.constraint_field


def openai_schema(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, **more}}


@pytest.mark.parametrize(
    ("fields", "constraint", "field"),
    [
        ({}, None, ""),
        ({"response_format": None, "guided_json": None}, None, ""),
        ({"response_format": {"type": "text"}}, None, ""),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}, "response_format"),
        ({"response_format": openai_schema()}, {"json": SCHEMA}, "response_format.json_schema.schema"),
        (
            {"response_format": openai_schema(strict=True, description="d")},
            {"json": SCHEMA},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}, "structured_outputs.choice"),
        (
            {"structured_outputs": {"structural_tag": TAG}},
            {"structural_tag": TAG},
            "structured_outputs.structural_tag",
        ),
        (
            {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **TAG})}},
            {"structural_tag": TAG},
            "structured_outputs.structural_tag",
        ),
        ({"response_format": {"type": "structural_tag", **TAG}}, {"structural_tag": TAG}, "response_format"),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}, "guided_json"),
        ({"guided_json": '{"type": "object"}'}, {"json": '{"type": "object"}'}, "guided_json"),
        ({"guided_regex": "[a-z]+"}, {"regex": "[a-z]+"}, "guided_regex"),
        ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}, "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}, "guided_grammar"),
    ],
)
def test_every_name_gives_the_same_constraint(
    fields: dict[str, Any], constraint: dict[str, Any] | None, field: str
) -> None:
    wanted = None if constraint is None else StructuredOutputs.model_validate(constraint)
    assert call_of(**fields) == (wanted, field)


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema' or 'structural_tag'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs it"),
        ({"response_format": openai_schema(name="")}, "response_format.json_schema.name", "at least 1"),
        ({"response_format": openai_schema(shema=1)}, "response_format.json_schema.shema", "no such parameter"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "there are response_format and guided_regex",
        ),
        ({"guided_choice": []}, "guided_choice", "at least 1 item"),
        (
            {"structured_outputs": {"structural_tag": {"format": {"type": "json_schema"}}}},
            "structured_outputs.structural_tag",
            "the newer shape with format is not taken",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "json_schema"}}},
            "response_format",
            "the newer shape with format is not taken",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format.structures", "required"),
        (
            {"response_format": {"type": "structural_tag", **TAG, "triggers": []}},
            "response_format.triggers",
            "at least 1",
        ),
        (
            {"response_format": {"type": "json_object", **TAG}},
            "response_format.structures",
            "only with type structural_tag",
        ),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag", "not valid JSON"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one of"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as error:
        call_of(**fields)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("constraint", "parts"),
    [
        ({"choice": ['say "a"', "b\n"]}, ['"say \\"a\\""', '"b\\n"']),
        ({"grammar": 'root ::= "a" | "b"'}, ["start:"]),  # GBNF
        ({"grammar": 'start: "a"'}, ['start: "a"']),
        ({"json": SCHEMA}, ['"integer"', '"key_separator":": "']),
        ({"json": SCHEMA, "whitespace_pattern": "[ ]{1,3}"}, ['"whitespace_pattern":"[ ]{1,3}"']),
        ({"json": SCHEMA, "disable_any_whitespace": True}, ['"whitespace_flexible":false']),
        ({"json_object": True}, ['"object"']),
    ],
)
def test_constraints_become_grammars(constraint: dict[str, Any], parts: list[str]) -> None:
    text = StructuredOutputs.model_validate(constraint).grammar_text("test")
    assert all(part in text for part in parts)


@pytest.mark.parametrize(
    "grammar", ["{{ x }}", "{}", ' \n{"grammars": []}', '\u2028{"grammars": [{"json_schema": {}}]}']
)
def test_a_grammar_in_the_librarys_own_json_is_refused(grammar: str) -> None:
    """It would be followed without the checks of schemas, and fail where it becomes a part of another."""
    with pytest.raises(InvalidRequest, match="notation of Lark or of GBNF"):
        StructuredOutputs(grammar=grammar).grammar_text("test")
