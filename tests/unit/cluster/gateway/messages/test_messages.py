"""/v1/messages over HTTP, over a router that says what a test wants a model to say.

Covers `cluster.gateway.messages`, and `messages_face` and `error_answer` of `cluster.gateway.door`.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.errors import DeadlineExceeded, Overloaded
from cluster.gateway.door.request_bodies import LimitBodies
from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.gateway_config import GatewayConfig
from cluster.tenants.access import TenantAccess
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.gatekeeper import Gatekeeper
from cluster.tenants.known_keys import KnownKeys
from paceline_testing.echo_gateway import gateway_client
from paceline_testing.saying_router import THINKING, SayingRouter, saying_service
from paceline_testing.tiny_models import make_byte_tokenizer

CITY = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
}  # fmt: skip
WEATHER = {"name": "weather", "description": "The weather of a city", "input_schema": CITY}
TIME = {"name": "time", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern é"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"
HI = [{"role": "user", "content": "hi"}]
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]}


async def post(text: str, body: dict[str, Any], path: str = "/v1/messages", **options: Any) -> tuple[Any, SayingRouter]:
    """The answer, or its events where it is streamed, and the router."""
    config = options.pop("config", GatewayConfig())
    service, router = saying_service(text, config=config, **options)
    limit = {"max_tokens": 400} if path == "/v1/messages" else {}
    async with gateway_client(service, config) as client:
        answer = await client.post(path, json={"model": "tiny", "messages": HI, **limit, **body})
    if answer.status_code != 200 or not body.get("stream"):
        return answer.json(), router
    return events_of(answer.text), router


def events_of(text: str) -> list[dict[str, Any]]:
    *blocks, nothing = text.split("\n\n")
    assert nothing == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def prompt_of(router: SayingRouter) -> str:
    return str(make_byte_tokenizer().decode(router.requests[-1].prompt_token_ids))


def rebuilt(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as a client makes it of the events, with every event where it may be."""
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    message: dict[str, Any] = events[0]["message"]
    inputs: dict[int, str] = {}
    open_index: int | None = None
    for event in events[1:-2]:
        kind, index = event["type"], event["index"]
        if kind == "content_block_start":
            assert (open_index, index) == (None, len(message["content"]))
            open_index = index
            message["content"].append(event["content_block"])
            continue
        assert index == open_index
        block = message["content"][index]
        if kind == "content_block_stop":
            open_index = None
            if block["type"] == "tool_use" and inputs.get(index):
                block["input"] = json.loads(inputs[index])
            continue
        assert kind == "content_block_delta"
        delta = event["delta"]
        if delta["type"] == "input_json_delta":
            assert block["type"] == "tool_use"
            inputs[index] = inputs.get(index, "") + delta["partial_json"]
        else:
            assert delta["type"] == f"{block['type']}_delta"
            block[block["type"]] += delta[block["type"]]
    assert open_index is None
    last = events[-2]
    assert last["type"] == "message_delta"
    rest = {name: last[name] for name in ("speculation",) if name in last}
    return {**message, **last["delta"], "usage": last["usage"], **rest}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


async def test_an_answer_has_thoughts_text_and_calls_as_blocks():
    answer, _ = await post(f"{THOUGHT}Let me see.\n{CALL}\n{OTHER}", {"tools": [WEATHER, TIME]}, template=THINKING)
    thought, text, call, other = answer["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert (text["type"], text["text"].strip()) == ("text", "Let me see.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Bern é"})
    assert (other["name"], other["input"]) == ("time", {})
    assert call["id"] != other["id"]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    usage = answer["usage"]
    assert usage["cache_read_input_tokens"] == (usage["input_tokens"] + usage["cache_read_input_tokens"]) // 2 > 0
    assert usage["output_tokens_details"] == {"thinking_tokens": 2}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(["é text ", "\n", CALL, OTHER, "<tool_call>", "<think>", "</think>", "{}"]), max_size=5),
    st.integers(1, 9),
    st.booleans(),
    st.lists(st.sampled_from(["xt", "text", "}", "zz"]), max_size=2),
)
@example(["<think>", "é", "</think>", "a ", CALL, OTHER], 3, True, [])
async def test_a_stream_builds_the_whole_answer(parts, chunk_tokens, thinks, stops):
    options = {"template": THINKING if thinks else None, "chunk_tokens": chunk_tokens}
    body = {"tools": [WEATHER, TIME], "stop_sequences": stops, "speculation": {"stats": True}}
    whole, _ = await post("".join(parts), body, **options)
    events, _ = await post("".join(parts), {**body, "stream": True}, **options)
    if not stops:  # they may cut a call
        assert without_ids(rebuilt(events)) == without_ids(whole)
    else:
        assert events[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    matched = any(stop in "".join(parts) for stop in stops)
    assert (whole["stop_reason"] == "stop_sequence") == matched == (whole["stop_sequence"] in stops)


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 4}, "max_tokens", None),
        ({"stop_sequences": ["zz", "wor"]}, "stop_sequence", "wor"),
        ({"stop_sequences": ["o w", "lo w", "w"]}, "stop_sequence", "lo w"),
    ],
)
async def test_why_it_stopped(fields, reason, sequence):
    for streams in (False, True):
        answer, _ = await post("Hello world", {**fields, "stream": streams})
        message = rebuilt(answer) if streams else answer
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
        assert message["content"][0]["text"] == {"end_turn": "Hello world", "max_tokens": "Hell"}.get(
            reason, "Hello world".partition(sequence or "!")[0]
        )


async def test_a_call_that_is_cut_off_has_the_members_that_are_whole():
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": [1, 2'
    answer, _ = await post(text, {"tools": [WEATHER]})
    assert answer["content"][0]["input"]["city"] == "Bern"


async def test_an_empty_answer_has_no_blocks():
    answer, _ = await post("", {})
    assert (answer["content"], answer["stop_reason"]) == ([], "end_turn")


async def test_a_conversation_becomes_the_prompt():
    template = (
        "{% for m in messages %}[{{ m.role }} {{ m.content }} {{ m.reasoning_content }} "
        "{{ m.tool_calls | length if m.tool_calls else 0 }}]{% endfor %}{{ tools }}{# <tool_call> #}"
    )
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                                     {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "so", "signature": "x"}, {"type": "redacted_thinking", "data": "?"},
            {"type": "text", "text": "c"}, USE, {**USE, "id": "toolu_2"},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True}, RESULT, {"type": "text", "text": "d"},
        ]},
        {"role": "system", "content": "e"},
    ]  # fmt: skip
    system = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    _, router = await post("ok", {"system": system, "messages": messages, "tools": [WEATHER]}, template=template)
    assert prompt_of(router).startswith(
        "[system be brief  0][user ab  0][assistant c so 2][tool   0][tool sunny  0][user d  0][system e  0]"
    )
    assert "The weather of a city" in prompt_of(router)


async def test_an_answer_continues_the_assistants_last_message():
    messages = [*HI, {"role": "assistant", "content": "It is"}]
    _, router = await post("ok", {"messages": messages})
    assert prompt_of(router).endswith("It is")


@pytest.mark.parametrize(
    ("choice", "has_grammar"),
    [
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "time", "disable_parallel_tool_use": True}, True),
    ],
)
async def test_forced_calls_have_a_grammar(choice, has_grammar):
    answer, router = await post(OTHER, {"tools": [WEATHER, TIME], "tool_choice": choice})
    assert bool(router.requests[0].grammar) == has_grammar
    assert ('"weather' in router.requests[0].grammar) == (choice["type"] == "any")
    assert answer["content"][0]["type"] == ("text" if choice["type"] == "none" else "tool_use")


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({"thinking": {"type": "disabled"}}, "False"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True"),
        ({"thinking": {"type": "adaptive"}}, "True"),
        ({}, ""),
        ({"chat_template_kwargs": {"enable_thinking": 5}}, "5"),
    ],
)
async def test_thinking_goes_to_the_template(fields, written):
    _, router = await post("ok", fields, template="{{ enable_thinking }}<")
    assert prompt_of(router) == f"{written}<"


async def test_what_changes_nothing_is_taken_and_formats_are_followed():
    fields = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "top_k": 5, "top_p": 0.5, "temperature": 0.1,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object", "title": "mine"}}},
        "speculation": {"enabled": False}, "seed": 7, "stop": None, "cache_control": {"type": "ephemeral"},
    }  # fmt: skip
    _, router = await post("{}", fields)
    request = router.requests[0]
    assert "mine" in request.grammar
    assert (request.sampling.seed, request.sampling.top_k, request.drafters) == (7, 5, ())


async def test_tokens_are_counted_as_they_are_used():
    body = {"system": "be brief", "tools": [WEATHER], "messages": [*HI, {"role": "assistant", "content": [USE]},
                                                                   {"role": "user", "content": [RESULT]}]}  # fmt: skip
    counted, router = await post("", body, "/v1/messages/count_tokens")
    assert not router.requests
    answer, _ = await post("", body)
    usage = answer["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens is null; it must be a whole number"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"messages": []}, "messages is a list of 0 items; it must have at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing; it is required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5; it must be a string or a list of"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0].type is 'image'; it must be text or thinking or redacted_thinking or tool_use or "),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is missing"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id is 'toolu_1'"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type is 'tool_use'"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "results are in messages of role user"),
        ({"system": 5}, "system is 5; it must be a string or a list of text blocks"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema is missing; it is required"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].type"),
        ({"tools": [TIME, TIME]}, "tools[1].name is 'time'; another tool has this name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is 'required'; it needs tools"),
        ({"tools": [TIME], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name is 'x'; it is none of"),
        ({"tools": [TIME], "tool_choice": "any"}, "tool_choice is 'any'; it must be an object whose type is auto"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences is 17 strings; at most 16 are taken"),
        ({"stop": ["a"]}, "stop is a list of 1 item; here they are stop_sequences"),
        ({"max_token": 1}, "did you mean max_tokens?"),
        ({"thinking": {"type": "disabled"}, "template": THINKING}, "thinking.type is 'disabled'"),
        ({"output_config": {"effort": "high"}}, "output_config.effort is 'high'"),
        ({"mcp_servers": [1]}, "mcp_servers is a list of 1 item; it must be empty"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named_in_anthropics_shape(fields, words):
    template = fields.pop("template", None) if "template" in fields else None
    answer, router = await post("", fields, template=template)
    assert answer.keys() == {"type", "error"}
    assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    assert words in answer["error"]["message"]
    assert not router.requests


async def test_unknown_fields_may_be_ignored():
    config = GatewayConfig(unknown_fields="ignore")
    answer, _ = await post("hi", {"wibble": 1, "messages": [{**HI[0], "x": 2}]}, config=config)
    assert answer["type"] == "message"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full", 2.0), 429, "rate_limit_error"),
        (DeadlineExceeded("late"), 504, "timeout_error"),
        (RuntimeError("secret"), 500, "api_error"),
    ],
)
async def test_errors_have_anthropics_types_before_and_inside_a_stream(error, status, kind):
    for streams in (True, False):
        service, router = saying_service("some long text")
        router.failures = [(0, error)]
        async with gateway_client(service, GatewayConfig()) as client:
            answer = await client.post("/v1/messages", json={"messages": HI, "max_tokens": 9, "stream": streams})
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        assert int(answer.headers["content-length"]) == len(answer.content)
    if status == 429:  # inside a stream it is tried again
        return
    service, router = saying_service("some long text")
    router.failures = [(6, error)]
    async with gateway_client(service, GatewayConfig()) as client:
        answer = await client.post("/v1/messages", json={"messages": HI, "max_tokens": 99, "stream": True})
    last = events_of(answer.text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", kind)
    assert "secret" not in answer.text


async def test_paths_methods_and_types_of_bodies_are_refused_in_anthropics_shape():
    service, _ = saying_service("")
    async with gateway_client(service, GatewayConfig()) as client:
        for answer, status in (
            (await client.get("/v1/messages"), 405),
            (await client.post("/v1/messages/batches", json={}), 404),
            (await client.post("/v1/messages", content="{", headers={"content-type": "application/json"}), 400),
            (await client.post("/v1/messages", content="{}", headers={"content-type": "text/plain"}), 415),
            (await client.post("/v1/messages", json={"messages": HI, "max_tokens": 5, "model": "other"}), 404),
        ):
            assert answer.status_code == status, answer.text
            assert answer.json()["type"] == "error"
        assert (await client.get("/v1/messages")).headers["allow"] == "POST"
        assert "error" in (await client.get("/v1/completions")).json()
        assert "type" not in (await client.get("/v1/completions")).json()


async def test_a_key_may_come_in_x_api_key_on_this_path_alone(tmp_path):
    issued = TenantAdministration(tmp_path / "tenants.json", allow_shared=True).add("a", {})
    metrics = GatewayMetrics()
    access = TenantAccess(tmp_path / "tenants.json", may_be_open=False, allow_shared=True)
    gatekeeper = Gatekeeper(access, 1, metrics.tenant_refusals, metrics.tenant_registry_failures)
    service, _ = saying_service("hi", metrics=metrics, gatekeeper=gatekeeper)
    key, bearer = {"x-api-key": issued.key}, {"authorization": f"Bearer {issued.key}"}
    body = {"messages": HI, "max_tokens": 5}
    async with gateway_client(service, GatewayConfig(stream_interval_ms=0)) as client:
        for headers in (key, bearer, {**bearer, "x-api-key": "other"}):
            assert (await client.post("/v1/messages", json=body, headers=headers)).status_code == 200
            assert (await client.post("/v1/messages/count_tokens", json={"messages": HI}, headers=headers)).is_success
        for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": ""}, {**key, "authorization": "Bearer wrong"}):
            answer = await client.post("/v1/messages", json=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert (await client.post("/v1/chat/completions", json={"messages": HI}, headers=key)).status_code == 401


@pytest.mark.parametrize(("path", "sees_body"), [("/v1/messages", True), ("/v1/completions", False)])
async def test_the_proxy_reads_a_body_with_either_key(path, sees_body):
    seen = []

    async def app(scope, receive, send):
        seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    transport = httpx.ASGITransport(LimitBodies(app, max_bytes=100, keys=KnownKeys(None)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        await client.post(path, content=b"body", headers={"x-api-key": "k"})
    assert seen == [b"body" if sees_body else b""]


async def test_openapi_has_the_bodies():
    service, _ = saying_service("")
    async with gateway_client(service, GatewayConfig()) as client:
        document = (await client.get("/openapi.json")).json()
    for path, required in (("/v1/messages", {"messages", "max_tokens"}), ("/v1/messages/count_tokens", {"messages"})):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
        assert set(schema["required"]) == required
