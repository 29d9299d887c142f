"""Tools, reasoning, log-probabilities and echo over gRPC, over a router that says what a test wants a model to say.

Covers `answer`, `chat` and `servicer` of `cluster.gateway.grpc`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.constraints.structured_outputs import StructuredOutputs
from cluster.gateway.grpc.servicer import InferenceServicer
from cluster.gateway.paceline.v1 import inference_pb2 as pb
from cluster.gateway.paceline.v1.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from cluster.gateway_config import GatewayConfig
from cluster.text.constraint_grammar import constraint_grammar
from cluster.text.special_tokens import special_token_ids
from paceline_testing.saying_router import THINKING, SayingRouter, saying_service
from paceline_testing.tiny_models import make_byte_tokenizer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = pb.Tool(name="weather", description="The weather of a city", parameters=json.dumps(SCHEMA))
TIME = pb.Tool(name="time")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern é"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
HI = pb.Conversation(messages=[pb.Message(role="user", content="hi")])
REQUIRED = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)


@asynccontextmanager
async def stub_of(text: str, **options: Any) -> AsyncIterator[tuple[InferenceStub, SayingRouter]]:
    service, router = saying_service(text, **options)
    server = grpc.aio.server()
    add_InferenceServicer_to_server(InferenceServicer(service, GatewayConfig()), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield InferenceStub(channel), router
    finally:
        await server.stop(None)


async def ask(text: str, request: pb.GenerateRequest, **options: Any) -> tuple[pb.GenerateResponse, SayingRouter]:
    async with stub_of(text, **options) as (stub, router):
        return await stub.Generate(request), router


def chat(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(conversation=HI, **{"max_tokens": 400, **fields})


def said(response: pb.GenerateResponse) -> dict[str, Any]:
    return {
        "text": response.text,
        "reasoning": response.reasoning,
        "calls": [(call.name, call.arguments) for call in response.tool_calls],
        "reason": response.finish_reason,
        "logprobs": [entry.SerializeToString() for entry in response.logprobs],
        "usage": response.usage.SerializeToString(),
    }


def joined(chunks: list[pb.GenerateChunk]) -> dict[str, Any]:
    calls: list[tuple[str, str]] = []
    for number, chunk in enumerate(chunks):
        assert chunk.sequence_number == number
        for delta in chunk.tool_calls:
            if delta.id:
                assert delta.index == len(calls)
                calls.append((delta.name, ""))
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    assert all(not chunk.finish_reason for chunk in chunks[:-1])
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "reasoning": "".join(chunk.reasoning for chunk in chunks),
        "calls": calls,
        "reason": chunks[-1].finish_reason,
        "logprobs": [entry.SerializeToString() for chunk in chunks for entry in chunk.logprobs],
        "usage": chunks[-1].usage.SerializeToString(),
    }


async def test_an_answer_has_reasoning_text_and_calls():
    text = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}\n{OTHER}"
    answer, _ = await ask(text, chat(tools=[WEATHER, TIME]), template=THINKING)
    assert (answer.reasoning, answer.text.strip()) == ("hm", "Let me see.")
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [
        ("weather", '{"city": "Bern é"}'),
        ("time", "{}"),
    ]
    assert len({call.id for call in answer.tool_calls}) == 2
    assert answer.finish_reason == pb.FINISH_REASON_TOOL_CALLS


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(["é text ", "\n", CALL, OTHER, "<tool_call>", "<think>", "</think>", "{}"]), max_size=5),
    st.integers(1, 9),
    st.booleans(),
)
@example(["<think>", "é", "</think>", "a ", CALL, OTHER], 3, True)
async def test_a_stream_says_what_the_whole_answer_says(parts, chunk_tokens, has_logprobs):
    request = chat(tools=[WEATHER, TIME], logprobs=1 if has_logprobs else None, speculation=pb.Speculation(stats=True))
    async with stub_of("".join(parts), template=THINKING, chunk_tokens=chunk_tokens) as (stub, _):
        whole = await stub.Generate(request)
        assert said(whole) == joined([chunk async for chunk in stub.GenerateStream(request)])
    assert bool(whole.logprobs) == (has_logprobs and bool(parts))


async def test_a_service_tier_is_a_class():
    for tier, service_class in (("", "interactive"), ("auto", "interactive"), ("flex", "batch")):
        _, router = await ask("hi", chat(service_tier=tier))
        assert router.requests[0].service_class == service_class


async def test_without_tools_marks_of_calls_are_text_and_special_tokens_are_not():
    answer, _ = await ask(CALL, chat())
    assert (answer.text, list(answer.tool_calls)) == (CALL, [])
    assert answer.finish_reason == pb.FINISH_REASON_STOP
    answer, _ = await ask("<think>a</think>b", chat(), template=THINKING)
    assert (answer.reasoning, answer.text) == ("a", "b")
    answer, _ = await ask(CALL, pb.GenerateRequest(prompt="hi", max_tokens=400))
    assert answer.text == CALL


@pytest.mark.parametrize(
    ("choice", "reason", "has_grammar"),
    [
        (pb.ToolChoice(), pb.FINISH_REASON_TOOL_CALLS, False),
        (pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_AUTO), pb.FINISH_REASON_TOOL_CALLS, False),
        (pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE), pb.FINISH_REASON_STOP, False),
        (REQUIRED, pb.FINISH_REASON_TOOL_CALLS, True),
        (pb.ToolChoice(function="time"), pb.FINISH_REASON_STOP, True),
    ],
)
async def test_forced_calls_have_a_grammar(choice, reason, has_grammar):
    answer, router = await ask(OTHER, chat(tools=[WEATHER, TIME], tool_choice=choice, parallel_tool_calls=False))
    assert (answer.finish_reason, bool(router.requests[0].grammar)) == (reason, has_grammar)
    _, router = await ask("hi", chat(tools=[pb.Tool(name="time", strict=True)]))
    assert router.requests[0].grammar


TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (pb.StructuredOutputs(json=json.dumps(SCHEMA)), {"json": SCHEMA}),
        (pb.StructuredOutputs(json_object=True), {"json_object": True}),
        (pb.StructuredOutputs(regex="a+"), {"regex": "a+"}),
        (pb.StructuredOutputs(choice=pb.Choices(texts=["a", "b"])), {"choice": ["a", "b"]}),
        (pb.StructuredOutputs(grammar='start: "a"'), {"grammar": 'start: "a"'}),
        (pb.StructuredOutputs(structural_tag=json.dumps(TAG)), {"structural_tag": TAG}),
        (
            pb.StructuredOutputs(json=json.dumps(SCHEMA), whitespace_pattern="[ ]*"),
            {"json": SCHEMA, "whitespace_pattern": "[ ]*"},
        ),
        (
            pb.StructuredOutputs(json=json.dumps(SCHEMA), disable_any_whitespace=True),
            {"json": SCHEMA, "disable_any_whitespace": True},
        ),
    ],
)
async def test_every_constraint_is_that_of_its_name_over_http(message, wanted):
    _, router = await ask("a", pb.GenerateRequest(prompt="hi", max_tokens=4, structured_outputs=message))
    special_ids = special_token_ids(make_byte_tokenizer())
    outputs = StructuredOutputs.model_validate(wanted)
    assert router.requests[0].grammar == constraint_grammar(outputs, special_ids, "structured_outputs")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.StructuredOutputs(), "exactly one of"),
        (pb.StructuredOutputs(regex=""), "structured_outputs.regex"),
        (pb.StructuredOutputs(whitespace_pattern=" "), "exactly one of"),
        (pb.StructuredOutputs(structural_tag="{"), "structured_outputs.structural_tag"),
        (pb.StructuredOutputs(json="{}", whitespace_pattern=" ", disable_any_whitespace=True), "exclude each other"),
    ],
)
async def test_a_constraint_that_is_none_is_refused_by_name(message, words):
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await ask("a", pb.GenerateRequest(prompt="hi", structured_outputs=message))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_calls_and_their_results_go_back():
    call = pb.ToolCall(id="call_1", name="weather", arguments='{"city": "Bern"}')
    messages = [
        *HI.messages,
        pb.Message(role="assistant", tool_calls=[call], reasoning="hm"),
        pb.Message(role="tool", tool_call_id="call_1", content="sunny"),
    ]
    template = (
        "{% for m in messages %}[{{ m.role }} {{ m.content }} {{ m.reasoning_content }} "
        "{{ m.tool_calls[0].function.arguments.city if m.tool_calls }}]{% endfor %}{{ tools[0].function.name }}"
        "{# <tool_call> #}"
    )
    conversation = pb.Conversation(messages=messages)
    async with stub_of("ok", template=template) as (stub, router):
        await stub.Generate(pb.GenerateRequest(conversation=conversation, tools=[WEATHER], max_tokens=9))
        counted = await stub.Tokenize(pb.TokenizeRequest(conversation=conversation, tools=[WEATHER]))
    prompt = router.requests[0].prompt_token_ids.tolist()
    assert make_byte_tokenizer().decode(prompt) == "[user hi  ][assistant  hm Bern][tool sunny  ]weather"
    assert list(counted.tokens) == prompt


async def test_log_probabilities_have_tokens_and_bytes():
    answer, router = await ask("é!", chat(logprobs=2, return_token_ids=True))
    assert router.requests[0].num_logprobs == 2
    assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
    assert b"".join(entry.text for entry in answer.logprobs).startswith("é!".encode())
    assert all(entry.HasField("logprob") and entry.logprob == 0 for entry in answer.logprobs)
    assert [len(entry.top) for entry in answer.logprobs] == [2] * len(answer.logprobs)
    answer, router = await ask("é!", pb.GenerateRequest(prompt="hi", logprobs=0, max_tokens=9))
    assert len(answer.logprobs) == answer.usage.completion_tokens
    answer, router = await ask("é!", pb.GenerateRequest(prompt="hi", max_tokens=9))
    assert (router.requests[0].num_logprobs, len(answer.logprobs)) == (-1, 0)


async def test_an_echo_begins_with_the_prompt():
    for request in (
        pb.GenerateRequest(prompt="hi ", echo=True, max_tokens=2),
        pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=make_byte_tokenizer().encode("hi ")), echo=True, max_tokens=2
        ),
    ):
        async with stub_of("you") as (stub, _):
            assert (await stub.Generate(request)).text == "hi yo"
            assert "".join([chunk.text async for chunk in stub.GenerateStream(request)]) == "hi yo"
    answer, _ = await ask("you", pb.GenerateRequest(prompt="hi ", echo=True, max_tokens=0))
    assert (answer.text, answer.finish_reason) == ("hi ", pb.FINISH_REASON_LENGTH)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (chat(tools=[pb.Tool(name="a b")]), "tools[0].name is 'a b'"),
        (chat(tools=[pb.Tool(name="a", parameters="[1]")]), "tools[0].parameters is a list of 1 item"),
        (chat(tools=[pb.Tool(name="a", parameters="{")]), "tools[0].parameters is 1 byte; it is not valid JSON"),
        (chat(tools=[TIME, TIME]), "tools[1].name is 'time'; another tool has this name"),
        (chat(tool_choice=REQUIRED), "tool_choice is 'required'; it needs tools"),
        (chat(tools=[TIME], tool_choice=pb.ToolChoice(function="x")), "tool_choice.function is 'x'; it is none of"),
        (chat(tools=[TIME], tool_choice=pb.ToolChoice(mode=9)), "tool_choice.mode is 9; it must be one of"),
        (chat(logprobs=21), "logprobs is 21; it must be at most 20"),
        (chat(echo=True), "echo is true; a conversation is not echoed"),
        (pb.GenerateRequest(prompt="x", logprobs=21), "logprobs is 21"),
        (pb.GenerateRequest(prompt="x", max_tokens=0), "max_tokens is 0; it must be at least 1"),
        (pb.GenerateRequest(prompt="x", tools=[TIME]), "tools is 1 tool; they need a conversation"),
        (pb.GenerateRequest(prompt="x", tool_choice=REQUIRED), "tool_choice is given; it needs a conversation"),
        (
            pb.GenerateRequest(prompt="x", chat_template=pb.ChatTemplate(reasoning_effort="high")),
            "chat_template is given; it needs a conversation",
        ),
        (
            pb.GenerateRequest(conversation=pb.Conversation(messages=[pb.Message(role="tool", tool_call_id="x")])),
            "messages[0].tool_call_id is 'x'",
        ),
        (
            pb.GenerateRequest(conversation=pb.Conversation(
                messages=[pb.Message(role="assistant", tool_calls=[pb.ToolCall(id="1", name="a", arguments="[")])]
            )),
            "messages[0].tool_calls[0].arguments is a string of 1 character",
        ),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named_with_its_place(request_, words):
    async with stub_of("") as (stub, router):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in caught.value.details()
    assert not router.requests
