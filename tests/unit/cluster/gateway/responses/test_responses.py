"""/v1/responses, read by OpenAI's own client and checked against its types, over a router that says what a test wants.

Covers `cluster.gateway.responses`, and `event_answer`, `content_scores`, `unions` and `tool_choice` below it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from actors.errors import DeadlineExceeded
from cluster.gateway.answers.content_scores import ContentScores
from cluster.gateway.answers.logprobs import TokenScore
from cluster.gateway_config import GatewayConfig
from cluster.text.tools.events import Content, Reasoning
from paceline_testing.echo_gateway import gateway_client
from paceline_testing.saying_router import THINKING, SayingRouter, saying_service
from paceline_testing.tiny_models import make_byte_tokenizer

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CITY = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
}  # fmt: skip
WEATHER = {"type": "function", "name": "weather", "description": "The weather of a city", "parameters": CITY}
TIME = {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern é"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"


@asynccontextmanager
async def official(text: str, **options: Any) -> AsyncIterator[tuple[openai.AsyncOpenAI, SayingRouter]]:
    config = options.pop("config", GatewayConfig())
    service, router = saying_service(text, config=config, **options)
    async with (
        gateway_client(service, config) as client,
        openai.AsyncOpenAI(api_key="-", base_url="http://localhost/v1", http_client=client, max_retries=0) as found,
    ):
        yield found, router


async def post(text: str, body: dict[str, Any], **options: Any) -> tuple[Any, SayingRouter]:
    """The answer, or its events where it is streamed, and the router."""
    config = options.pop("config", GatewayConfig())
    service, router = saying_service(text, config=config, **options)
    async with gateway_client(service, config) as client:
        answer = await client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 400, **body})
    if answer.status_code != 200 or not body.get("stream"):
        return answer.json(), router
    return events_of(answer.text), router


def events_of(text: str) -> list[dict[str, Any]]:
    """Checked: OpenAI's types, the names of lines, the numbers, the end."""
    *blocks, last, nothing = text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        EVENT.validate_python(event)
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def prompt_of(router: SayingRouter) -> str:
    return str(make_byte_tokenizer().decode(router.requests[-1].prompt_token_ids))


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """What two answers to one request have in common."""
    drop = {"id", "call_id", "created_at", "completed_at"}
    output = [{name: value for name, value in item.items() if name not in drop} for item in response["output"]]
    return {**{name: value for name, value in response.items() if name not in drop}, "output": output}


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client makes it of the events alone, with every event where it may be."""
    output: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind, index = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert (index, event["item"]["status"]) == (len(output), "in_progress")
            assert all(item["status"] != "in_progress" for item in output)
            output.append(event["item"])
            continue
        item = output[index]
        assert index == len(output) - 1
        if kind == "output_item.done":
            assert {**item, "status": event["item"]["status"]} == event["item"]
            output[index] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            assert event["content_index"] == len(item["content"]) == 0
            item["content"].append(event["part"])
        elif kind == "content_part.done":
            assert item["content"][0] == event["part"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert item["arguments"] == event["arguments"]
        elif kind.endswith("_text.delta"):
            item["content"][0]["text"] += event["delta"]
            item["content"][0].get("logprobs", []).extend(event.get("logprobs", ()))
        else:
            assert kind in ("output_text.done", "reasoning_text.done")
            assert item["content"][0]["text"] == event["text"]
    return output


async def test_an_answer_has_reasoning_text_and_calls_as_items():
    async with official(f"{THOUGHT}Let me see.\n{CALL}\n{OTHER}", template=THINKING) as (client, router):
        answer = await client.responses.create(model="tiny", input="hi", tools=[WEATHER, TIME], max_output_tokens=400)
        thought, message, call, other = answer.output
        assert (thought.content[0].text, message.content[0].text.strip()) == ("hm", "Let me see.")
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bern é"})
        assert other.name == "time"
        assert len({item.id for item in answer.output}) == 4
        assert (answer.status, answer.incomplete_details, answer.store) == ("completed", None, False)
        assert answer.usage.output_tokens_details.reasoning_tokens == 2
        assert answer.usage.input_tokens_details.cached_tokens == answer.usage.input_tokens // 2
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
        # As agents do: all items go back, as they came, with the calls' outputs.
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
            {"type": "function_call_output", "call_id": other.call_id,
             "output": [{"type": "input_text", "text": "noon"}]},
        ]  # fmt: skip
        await client.responses.create(
            model="tiny", input=[{"role": "user", "content": "hi"}, *answer.output, *outputs], tools=[WEATHER, TIME]
        )
        assert "user: hi\nassistant: Let me see.\n\ntool: sunny\ntool: noon\n" in prompt_of(router)
        dumped = [item.model_dump() for item in answer.output]
        await client.responses.create(model="tiny", input=[*dumped, *outputs], tools=[WEATHER, TIME])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(["é text ", "\n", CALL, OTHER, "<tool_call>", "<think>", "</think>", "{}"]), max_size=5),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.sampled_from([7, 60, 400]),
)
@example(["<think>", "é", "</think>", "a ", CALL, OTHER], 3, True, True, 400)
async def test_a_stream_builds_the_whole_answer(parts, chunk_tokens, thinks, has_logprobs, max_tokens):
    options = {"template": THINKING if thinks else None, "chunk_tokens": chunk_tokens}
    body = {"tools": [WEATHER, TIME], "max_output_tokens": max_tokens, "speculation": {"stats": True}}
    if has_logprobs:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole, _ = await post("".join(parts), body, **options)
    events, _ = await post("".join(parts), {**body, "stream": True}, **options)
    Response.model_validate(whole)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert rebuilt(events) == last["response"]["output"]
    assert without_ids(last["response"]) == without_ids(whole)
    assert whole["output"]
    for item in whole["output"]:
        if item["type"] == "message" and has_logprobs:
            spelled = bytes(byte for one in item["content"][0]["logprobs"] for byte in one["bytes"])
            assert item["content"][0]["text"].rstrip("\ufffd").encode() in spelled
    is_cut = whole["usage"]["output_tokens"] == max_tokens and len("".join(parts).encode()) >= max_tokens
    assert whole["status"] == ("incomplete" if is_cut else "completed")
    assert whole["output"][-1]["status"] == whole["status"]
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)


async def test_the_streaming_helper_of_the_official_client():
    async with (
        official(f"{THOUGHT}Hi there\n{CALL}", template=THINKING) as (client, _),
        client.responses.stream(model="tiny", input="hi", tools=[WEATHER], max_output_tokens=400) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text.strip() == "Hi there"
    assert final.output[-1].arguments == '{"city": "Bern é"}'
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == 3


class City(BaseModel):
    city: str
    days: int


async def test_parse_follows_a_schema():
    async with official('{"city": "Bern", "days": 3}') as (client, router):
        answer = await client.responses.parse(model="tiny", input="hi", text_format=City, max_output_tokens=99)
        assert answer.output_parsed == City(city="Bern", days=3)
        assert "days" in router.requests[0].grammar
        assert answer.text.format.type == "json_schema"
        await client.responses.create(model="tiny", input="hi", text={"format": {"type": "json_object"}})
        assert router.requests[1].grammar
        await client.responses.create(model="tiny", input="hi", text={"format": {"type": "text"}})
        assert not router.requests[2].grammar


async def test_instructions_and_messages_become_the_prompt():
    items = [
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"},
                                                        {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}], "id": "msg_1"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]},
        {"type": "function_call", "call_id": "x", "name": "time", "arguments": ""},
        {"type": "function_call", "call_id": "y", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "y", "output": "1"},
        {"type": "function_call_output", "call_id": "x", "output": "2"},
        {"role": "user", "content": "d"},
    ]  # fmt: skip
    template = (
        "{% for m in messages %}[{{ m.role }} {{ m.content }} {{ m.reasoning_content }} "
        "{{ m.tool_calls | length if m.tool_calls else 0 }}]{% endfor %}{{ tools }}{# <tool_call> #}"
    )
    answer, router = await post("ok", {"instructions": "be brief", "input": items, "tools": [TIME]}, template=template)
    assert prompt_of(router).startswith(
        "[system be brief  0][system be kind  0][user ab  0][assistant c  0][assistant  so 2][tool 1  0][tool 2  0]"
        "[user d  0]"
    )
    assert answer["instructions"] == "be brief"


@pytest.mark.parametrize(
    ("choice", "has_grammar"),
    [
        ("auto", False),
        ("none", False),
        ("required", True),
        ({"type": "function", "name": "time"}, True),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}, True),
    ],
)
async def test_forced_calls_have_a_grammar(choice, has_grammar):
    answer, router = await post(OTHER, {"tools": [TIME], "tool_choice": choice})
    assert bool(router.requests[0].grammar) == has_grammar
    assert answer["tool_choice"] == choice
    assert answer["output"][0]["type"] == ("message" if choice == "none" else "function_call")


async def test_tools_are_strict_unless_they_say_otherwise():
    _, router = await post("hi", {"tools": [WEATHER]})
    assert "city" in router.requests[0].grammar
    answer, router = await post("hi", {"tools": [{**WEATHER, "strict": False}], "parallel_tool_calls": False})
    assert not router.requests[0].grammar
    assert (answer["tools"][0]["strict"], answer["parallel_tool_calls"]) == (False, False)


async def test_the_answer_repeats_what_was_asked_and_what_changes_nothing_is_taken():
    fields = {
        "metadata": {"who": "me"}, "temperature": 0.5, "top_p": 0.9, "store": False, "truncation": "disabled",
        "include": ["reasoning.encrypted_content"], "user": "u", "safety_identifier": "s", "prompt_cache_key": "k",
        "service_tier": "auto", "reasoning": {"effort": None, "summary": "auto"}, "background": False,
        "previous_response_id": None, "conversation": None, "prompt": None, "max_tool_calls": 3, "seed": 5,
        "stream_options": {"include_obfuscation": False}, "text": {"verbosity": "medium"},
        "speculation": {"enabled": False},
    }  # fmt: skip
    answer, router = await post("hi", fields)
    for name in ("metadata", "temperature", "top_p", "store", "user", "safety_identifier", "prompt_cache_key"):
        assert answer[name] == fields[name]
    assert answer["reasoning"]["effort"] is None
    assert answer["service_tier"] == "default"
    assert router.requests[0].sampling.seed == 5
    assert router.requests[0].drafters == ()


@pytest.mark.parametrize(
    ("template", "effort", "written"),
    [
        ("{{ reasoning_effort }}<", "low", "low<"),
        ("{{ enable_thinking }}<", "none", "False<"),
        ("plain<", "none", "plain<"),
        ("{{ enable_thinking }}<", "high", None),
        (THINKING, "none", None),
    ],
)
async def test_an_effort_goes_to_the_template_or_is_refused(template, effort, written):
    answer, router = await post("hi", {"reasoning": {"effort": effort}}, template=template)
    if written is None:
        assert answer["error"]["param"] == "reasoning.effort"
        assert "chat template has no variable for it" in answer["error"]["message"]
    else:
        assert prompt_of(router).startswith(written)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"store": True}, "store", "nothing is stored here"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored here; send all items"),
        ({"conversation": {"id": "c"}}, "conversation", "nothing is stored here; send all items"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"messages": []}, "messages", "here they are input"),
        ({"max_output_token": 5}, "max_output_token", "did you mean max_output_tokens?"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "at most 4096 tokens are generated"),
        ({"n": 2}, "n", "it must be at most 1"),
        ({"background": True}, "background", "send background: false"),
        ({"truncation": "auto"}, "truncation", "'disabled'"),
        ({"top_logprobs": 2}, "top_logprobs", "it needs include"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": 5}, "input", "a string or a list of items"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "it must be message or function_call"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "'user', 'assistant'"),
        ({"input": [{"role": "user"}]}, "input[0].content", "it is required"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type",
         "'input_image'; it must be input_text"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input[0].call_id",
         "an earlier function_call"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "["}]}, "input[0].arguments",
         "one JSON object"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tools": [TIME, TIME]}, "tools[1].name", "another tool has this name"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "it needs tools"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "which are time"),
        ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice.name", "it is required"),
        ({"tools": [TIME], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "function or allowed_tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "it is required"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text or json_object or json_schema"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
         "structured_outputs.regex", "text and structured_outputs"),
        ({"metadata": {"a": 1}}, "metadata.a", "it must be a string"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named_with_its_place(fields, param, words):
    answer, router = await post("", fields)
    assert answer["error"]["param"] == param
    assert words in answer["error"]["message"]
    assert not router.requests


async def test_unknown_fields_may_be_ignored():
    config = GatewayConfig(unknown_fields="ignore")
    answer, _ = await post("hi", {"wibble": 1, "input": [{"role": "user", "content": "x", "y": 2}]}, config=config)
    assert answer["status"] == "completed"


async def test_an_error_before_the_answer_is_a_status_and_one_inside_a_stream_is_an_event():
    for after, streams in ((0, True), (0, False), (6, False)):
        service, router = saying_service("some long text")
        router.failures = [(after, DeadlineExceeded("too late"))]
        async with gateway_client(service, GatewayConfig()) as client:
            answer = await client.post("/v1/responses", json={"input": "hi", "stream": streams})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    service, router = saying_service("some long text")
    router.failures = [(6, DeadlineExceeded("too late"))]
    async with gateway_client(service, GatewayConfig()) as client:
        text = (await client.post("/v1/responses", json={"input": "hi", "stream": True})).text
    last = json.loads(text.split("\n\n")[-2].partition("data: ")[2])
    EVENT.validate_python(last)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "too late" in last["response"]["error"]["message"]
    assert last["response"]["output"][0]["content"][0]["text"] == "some l"


async def test_padded_events_have_a_few_sizes():
    service, _ = saying_service("some long text")
    async with gateway_client(service, GatewayConfig()) as client:
        body = {"input": "hi", "stream": True, "stream_options": {"include_obfuscation": True}}
        text = (await client.post("/v1/responses", json=body)).text
    deltas = [block.partition("data: ")[2] for block in text.split("\n\n") if "_text.delta" in block]
    assert {len(delta) for delta in deltas} == {512}


async def test_openapi_has_the_body():
    service, _ = saying_service("")
    async with gateway_client(service, GatewayConfig()) as client:
        document = (await client.get("/openapi.json")).json()
    reference = document["paths"]["/v1/responses"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][reference["$ref"].rpartition("/")[2]]
    assert {"input", "instructions", "max_output_tokens"} <= schema["properties"].keys()
    assert schema["required"] == ["input"]


@pytest.mark.parametrize("size", [1, 4, 100])
def test_scores_of_content_are_told_from_those_of_marks_and_thoughts(size):
    service, _ = saying_service("")
    strings = service.token_strings
    scores = [TokenScore(token, -1.0) for token in make_byte_tokenizer().encode("<think>hé</think>Bye <")]
    found = ContentScores(strings)
    waiting = [Reasoning("hé"), Content("Bye ")]
    seen, taken = b"", []
    for start in range(0, len(scores), size):
        new = scores[start : start + size]
        found.add(new)
        seen += b"".join(strings.bytes_of(score.token_id) for score in new)
        while waiting and waiting[0].text.encode() in seen:
            taken.append(b"".join(strings.bytes_of(score.token_id) for score in found.take(waiting.pop(0))))
    assert taken == ["hé".encode(), b"Bye "]
