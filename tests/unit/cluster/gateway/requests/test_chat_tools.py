"""Chat completions with tools and thoughts, over a router that says what a test wants a model to say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.gateway_config import GatewayConfig
from paceline_testing.echo_gateway import gateway_client
from paceline_testing.echo_router import EchoRouter
from paceline_testing.saying_router import THINKING, saying_service
from paceline_testing.tiny_models import make_byte_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern é"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


async def ask(text: str, chunk_tokens: int = 3, template: str | None = None, **fields: Any) -> tuple[Any, EchoRouter]:
    """The answer, or its chunks where it is streamed, and the router."""
    config = GatewayConfig()
    service, router = saying_service(text, chunk_tokens, template, config)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, **fields}
    async with gateway_client(service, config) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200 or not fields.get("stream"):
        return answer.json(), router
    blocks = [block.removeprefix("data: ") for block in answer.text.split("\n\n") if block]
    assert blocks.pop() == "[DONE]"
    return [json.loads(block) for block in blocks], router


def message_of(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's deltas make, as clients join them, and the finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            assert reason is None
            reason = choice["finish_reason"]
    return {**message, "finish_reason": reason}


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    (choice,) = answer["choices"]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": [call["function"] for call in message.get("tool_calls", [])],
        "finish_reason": choice["finish_reason"],
    }


async def test_a_call_is_an_object_and_ends_with_tool_calls():
    answer, _ = await ask(CALL, tools=[WEATHER, TIME])
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern é"}


async def test_text_and_several_calls_are_told_apart_and_have_ids_of_their_own():
    answer, _ = await ask(f"Let me see.\n{CALL}\n{OTHER}", tools=[WEATHER, TIME])
    message = answer["choices"][0]["message"]
    assert message["content"].strip() == "Let me see."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "time"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(["é text ", "\n", CALL, OTHER, "<tool_call>", "<think>", "</think>", "{}"]), max_size=5),
    st.integers(1, 9),
    st.booleans(),
)
async def test_a_stream_says_what_the_whole_answer_says(parts, chunk_tokens, thinks):
    template = THINKING if thinks else None
    fields = {"tools": [WEATHER, TIME], "template": template, "chunk_tokens": chunk_tokens}
    streamed, _ = await ask("".join(parts), stream=True, **fields)
    answer, _ = await ask("".join(parts), **fields)
    assert message_of(streamed) == whole(answer)


async def test_without_tools_or_with_choice_none_a_call_is_text():
    for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer, router = await ask(CALL, **fields)
        assert whole(answer)["content"] == CALL
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "weather" not in make_byte_tokenizer().decode(router.requests[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("choice", "reason", "has_grammar"),
    [
        ("auto", "tool_calls", False),
        ("required", "tool_calls", True),
        ({"type": "function", "function": {"name": "weather"}}, "stop", True),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
                {"type": "function", "function": {"name": "weather"}}]}}, "tool_calls", True,
        ),
    ],
)  # fmt: skip
async def test_a_forced_call_has_a_grammar(choice, reason, has_grammar):
    answer, router = await ask(CALL, tools=[WEATHER, TIME], tool_choice=choice)
    assert answer["choices"][0]["finish_reason"] == reason
    assert bool(router.requests[0].grammar) == has_grammar
    if not isinstance(choice, str):
        assert '"time' not in router.requests[0].grammar


async def test_a_strict_tool_and_a_format_of_the_content_have_a_grammar_with_choice_auto():
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    _, router = await ask("hi", tools=[strict])
    assert "city" in router.requests[0].grammar
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "title": "mine"}}}
    _, router = await ask("{}", tools=[WEATHER], response_format=form)
    assert "city" in router.requests[0].grammar
    assert "mine" in router.requests[0].grammar
    _, router = await ask("{}", tools=[WEATHER], response_format=form, tool_choice="required")
    assert "mine" not in router.requests[0].grammar


async def test_thoughts_are_apart_from_the_content():
    answer, _ = await ask("<think>\nhm\n</think>\n\nYes.", template=THINKING)
    assert whole(answer)["reasoning_content"] == "hm"
    assert whole(answer)["content"] == "Yes."
    answer, _ = await ask("hm</think>Yes.", template=THINKING + "{{ '<think>' }}")
    assert (whole(answer)["reasoning_content"], whole(answer)["content"]) == ("hm", "Yes.")


async def test_the_conversation_of_an_agent_becomes_a_prompt():
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    answer, router = await ask("Sunny.", messages=messages, tools=[WEATHER], parallel_tool_calls=False)
    assert whole(answer)["content"] == "Sunny."
    prompt = make_byte_tokenizer().decode(router.requests[0].prompt_token_ids)
    assert '"name": "weather", "arguments": {"city": "Bern"}' in prompt
    assert "sunny" in prompt
    assert "The weather of a city" in prompt


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "it needs tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "another tool has this name"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "tim"}}},
            "tool_choice.function.name",
            "none of the tools, which are weather",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "match"),
        ({"tools": [{"type": "web"}]}, "tools[0].type", "'function'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function", "it is required"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.type", "function or allowed_tools"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tools": [TIME] * 129}, "tools", "at most 128 items"),
        ({"top_logprobs": 2}, "top_logprobs", "it needs logprobs: true"),
        (
            {"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]},
            "messages[0].tool_call_id",
            "the id of a tool call in an earlier message",
        ),
    ],
)
async def test_what_is_wrong_with_tools_is_named(fields, param, words):
    answer, router = await ask("", **fields)
    assert answer["error"]["param"] == param
    assert words in answer["error"]["message"]
    assert not router.requests


async def test_tools_with_too_long_a_grammar_are_refused_by_name():
    long = {"type": "object", "properties": {"a": {"enum": ["x" * 300_000]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": long}}]
    answer, router = await ask(CALL, tools=tools, tool_choice="required")
    assert (answer["error"]["param"], answer["error"]["code"]) == ("tools", "invalid_value")
    assert router.requests == []
