"""Calls of tools, log-probabilities and echo over HTTP, with a real engine behind the gateway."""

from __future__ import annotations

import json
from typing import Any

import grpc
import jsonschema
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.gateway.paceline.v1 import inference_pb2 as pb
from cluster.gateway.paceline.v1.inference_pb2_grpc import InferenceStub
from cluster.gateway_config import GatewayConfig
from paceline_testing.echo_gateway import gateway_client, served
from paceline_testing.engine_router import engine_service
from paceline_testing.tiny_models import make_byte_tokenizer, save_tiny_model

CONFIG = GatewayConfig(max_new_tokens=1800)
ORDER = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array", "minItems": 1, "maxItems": 2,
            "items": {
                "type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2]}},
                "required": ["name", "size"], "additionalProperties": False,
            },
        },
        "express": {"type": "boolean"},
    },
    "required": ["items", "express"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "order", "parameters": ORDER}},
    {
        "type": "function",
        "function": {"name": "cancel", "parameters": {"type": "object", "additionalProperties": False}},
    },
]
MESSAGES = [{"role": "user", "content": "two of them"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    shape = {"hidden_size": 48, "heads": 4, "kv_heads": 2, "max_positions": 4096}
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", 5, layers=2, **shape)


@pytest.fixture(scope="module")
def service(model):
    return engine_service(model, CONFIG, kv_cache_tokens=8192, drafters=("auto",))


async def ask(service: Any, path: str, **fields: Any) -> dict[str, Any]:
    async with gateway_client(service, CONFIG) as client:
        answer = await client.post(path, json=fields, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat(service: Any, **fields: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "max_tokens": 1800, "seed": 3, "temperature": 1.0, **fields}
    return (await ask(service, "/v1/chat/completions", **body))["choices"][0]


async def test_forced_calls_of_a_random_model_follow_their_schemas_whoever_drafts(service):
    for choice in ("required", {"type": "function", "function": {"name": "order"}}):
        said = []
        for enabled in (False, True):
            found = await chat(
                service, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, speculation={"enabled": enabled}
            )
            (call,) = found["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
            jsonschema.validate(arguments, schema[call["function"]["name"]])
            said.append(call["function"])
        assert said[0] == said[1]


async def test_a_format_of_the_content_is_followed_beside_tools(service):
    form = {"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER, "strict": True}}
    found = await chat(service, tools=TOOLS, response_format=form)
    message = found["message"]
    if message.get("tool_calls"):
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) is not None
    else:
        jsonschema.validate(json.loads(message["content"]), ORDER)
    found = await chat(service, tools=TOOLS, response_format=form, tool_choice="none")
    jsonschema.validate(json.loads(found["message"]["content"]), ORDER)


def logprobs_of(model: Any, token_ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(model)(torch.tensor([token_ids])).logits[0].log_softmax(-1).numpy()


async def test_log_probabilities_of_a_chat_are_the_unpatched_models(service, model):
    found = await chat(service, logprobs=True, top_logprobs=3, return_token_ids=True, max_tokens=20)
    tokens = found["token_ids"]
    prompt = make_byte_tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    wanted = logprobs_of(model, [*prompt, *tokens])[len(prompt) - 1 :]
    content = found["logprobs"]["content"]
    assert len(content) == len(tokens) == 20
    for place, entry in enumerate(content):
        assert entry["logprob"] == pytest.approx(wanted[place, tokens[place]], abs=1e-4)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(
            np.sort(wanted[place])[::-1][:3].tolist(), abs=1e-4
        )
        spelled = bytes(entry["bytes"])
        assert entry["token"] in (spelled.decode(errors="replace"), "bytes:" + "".join(f"\\x{b:02x}" for b in spelled))
    spelled = bytes(byte for entry in content for byte in entry["bytes"])
    assert spelled.decode(errors="replace").startswith(found["message"]["content"].rstrip("\ufffd"))


async def test_streams_have_the_log_probabilities_of_whole_answers(service):
    fields = {"messages": MESSAGES, "max_tokens": 30, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = (await ask(service, "/v1/chat/completions", **fields))["choices"][0]["logprobs"]["content"]
    async with gateway_client(service, CONFIG) as client:
        answer = await client.post("/v1/chat/completions", json={**fields, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line and not line.endswith("[DONE]")]
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        if choice["logprobs"] is not None
        for entry in choice["logprobs"]["content"]
    ]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
    for one, other in zip(streamed, whole, strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_an_echo_scores_the_prompt_as_evaluation_tools_expect(service, model, max_tokens):
    prompt = make_byte_tokenizer().encode("The answer is é: ")
    found = await ask(
        service, "/v1/completions", prompt=prompt, max_tokens=max_tokens, temperature=0, echo=True, logprobs=1
    )
    (choice,) = found["choices"]
    scores = choice["logprobs"]
    assert found["usage"]["completion_tokens"] == max_tokens
    assert choice["text"].startswith("The answer is é: ")
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(prompt) + max_tokens
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    wanted = logprobs_of(model, prompt)
    for place in range(1, len(prompt)):
        assert scores["token_logprobs"][place] == pytest.approx(wanted[place - 1, prompt[place]], abs=1e-4)
        best = max(scores["top_logprobs"][place].values())
        assert best == pytest.approx(wanted[place - 1].max(), abs=1e-4)
        assert scores["tokens"][place] in scores["top_logprobs"][place]
    assert scores["text_offset"][:4] == [0, 1, 2, 3]


async def test_prompts_have_log_probabilities_as_vllm_gives_them(service, model):
    fields = {"max_tokens": 4, "temperature": 0, "prompt_logprobs": 2, "return_token_ids": True}
    found = await ask(service, "/v1/chat/completions", messages=MESSAGES, **fields)
    check_prompt(found["prompt_logprobs"], found["prompt_token_ids"], model)
    prompts = [make_byte_tokenizer().encode(text) for text in ("The answer is é: ", "A")]
    found = await ask(service, "/v1/completions", prompt=prompts, n=2, **fields)
    assert len(found["choices"]) == 4
    for choice in found["choices"]:
        check_prompt(choice["prompt_logprobs"], prompts[choice["index"] // 2], model)
        assert (choice["logprobs"], choice["prompt_token_ids"]) == (None, prompts[choice["index"] // 2])
    assert found["choices"][2]["prompt_logprobs"] == [None]


def check_prompt(scores, prompt, model):
    assert len(scores) == len(prompt)
    assert scores[0] is None
    wanted = logprobs_of(model, prompt)
    for place in range(1, len(prompt)):
        best = np.argsort(-wanted[place - 1])[:2].tolist()
        assert scores[place].keys() == {str(token) for token in (prompt[place], *best)}
        for token, said in scores[place].items():
            assert said["logprob"] == pytest.approx(wanted[place - 1, int(token)], abs=1e-4)
            assert said["rank"] == (best.index(int(token)) + 1 if int(token) in best else None)
            assert isinstance(said["decoded_token"], str)


def test_prompts_have_log_probabilities_over_grpc_whole_and_streamed(service, model):
    request = pb.GenerateRequest(
        conversation=pb.Conversation(messages=[pb.Message(**message) for message in MESSAGES]),
        prompt_logprobs=2,
        return_token_ids=True,
        max_tokens=9,
    )
    with served(service, CONFIG) as (_, address), grpc.insecure_channel(address) as channel:
        stub = InferenceStub(channel)
        answer = stub.Generate(request, timeout=60)
        first, *others = stub.GenerateStream(request, timeout=60)
    prompt = list(answer.prompt_token_ids)
    wanted = logprobs_of(model, prompt)
    assert [score.token_id for score in answer.prompt_logprobs] == prompt
    assert not answer.prompt_logprobs[0].HasField("logprob")
    for place, score in enumerate(answer.prompt_logprobs[1:]):
        assert score.logprob == pytest.approx(wanted[place, score.token_id], abs=1e-4)
        assert [top.token_id for top in score.top] == np.argsort(-wanted[place])[:2].tolist()
    assert list(first.prompt_logprobs) == list(answer.prompt_logprobs)
    assert not any(chunk.prompt_logprobs for chunk in others)


async def test_an_echo_and_prompt_log_probabilities_have_as_many_as_each_asks_for(service):
    fields = {"prompt": "The answer", "max_tokens": 0, "echo": True}
    for logprobs, count in ((0, 3), (3, 0), (None, 1)):
        found = await ask(service, "/v1/completions", **fields, logprobs=logprobs, prompt_logprobs=count)
        (choice,) = found["choices"]
        assert all(count <= len(tokens) <= count + 1 for tokens in choice["prompt_logprobs"][1:])
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            assert all(logprobs <= len(found) <= logprobs + 1 for found in choice["logprobs"]["top_logprobs"][1:])


async def test_the_best_of_several_answers_are_the_likeliest_whoever_asks_for_their_scores(service):
    fields = {"prompt": ["The answer is", "No"], "max_tokens": 6, "seed": 5, "temperature": 1.5}
    every = await ask(service, "/v1/completions", **fields, n=4, logprobs=1)
    groups = [every["choices"][:4], every["choices"][4:]]
    ranked = [sorted(group, key=lambda one: -np.mean(one["logprobs"]["token_logprobs"])) for group in groups]
    wanted = [one["text"] for group in ranked for one in group[:2]]
    assert wanted != [one["text"] for group in groups for one in group[:2]]
    for more in ({}, {"logprobs": 1}, {"echo": True, "logprobs": 1}):
        found = await ask(service, "/v1/completions", **fields, **more, n=2, best_of=4)
        echoed = [prompt * more.get("echo", False) for prompt in fields["prompt"] for _ in range(2)]
        assert [one["text"] for one in found["choices"]] == list(map("".join, zip(echoed, wanted, strict=True)))
        assert [one["index"] for one in found["choices"]] == [0, 1, 2, 3]
        assert [one["logprobs"] is not None for one in found["choices"]] == [bool(more)] * 4
        assert found["usage"] | {"prompt_tokens_details": {}} == every["usage"] | {"prompt_tokens_details": {}}


async def test_usage_tells_how_much_of_a_prediction_came_true(service):
    fields = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    first = await ask(service, "/v1/chat/completions", **fields)
    text = first["choices"][0]["message"]["content"]
    assert "completion_tokens_details" not in first["usage"]
    again = await ask(
        service,
        "/v1/chat/completions",
        **fields,
        prediction={"type": "content", "content": text},
        speculation={"drafters": ["prediction"]},
    )
    details = again["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == len(text.encode())


async def test_predictions_and_sources_of_tokens_are_told_over_grpc_as_over_http(service):
    fields = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    text = (await ask(service, "/v1/chat/completions", **fields))["choices"][0]["message"]["content"]
    drafters = ["prediction"]
    wanted = await ask(
        service,
        "/v1/chat/completions",
        **fields,
        prediction={"type": "content", "content": text},
        speculation={"drafters": drafters, "token_sources": True},
    )
    details = wanted["usage"]["completion_tokens_details"]
    request = pb.GenerateRequest(
        conversation=pb.Conversation(messages=[pb.Message(**message) for message in MESSAGES]),
        max_tokens=40,
        temperature=0,
        prediction=text,
        speculation=pb.Speculation(drafters=drafters, token_sources=True),
    )
    with served(service, CONFIG) as (_, address), grpc.insecure_channel(address) as channel:
        stub = InferenceStub(channel)
        answers = [stub.Generate(request, timeout=60), *stub.GenerateStream(request, timeout=60)]
        plain = stub.Generate(pb.GenerateRequest(prompt="a", max_tokens=2), timeout=60)
    whole, *chunks = answers
    over_http = wanted["choices"][0]["token_sources"]
    # How many guesses a round verifies depends on measured times, so who proposed a token may differ between calls.
    for sources in (whole.token_sources, [one for chunk in chunks for one in chunk.token_sources]):
        assert [one.text for one in sources] == [text for text, _ in over_http]
        assert {one.source for one in sources} == {"prediction", "target"}
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.accepted_prediction_tokens > 0
        told = usage.accepted_prediction_tokens + usage.rejected_prediction_tokens
        assert told == details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
    assert not plain.usage.HasField("accepted_prediction_tokens")
    assert not plain.token_sources


async def test_all_endpoints_say_what_chat_completions_say(service):
    found = await chat(service, temperature=0, max_tokens=40, logprobs=True, top_logprobs=2)
    text, scores = found["message"]["content"], found["logprobs"]["content"]
    response = await ask(
        service,
        "/v1/responses",
        input="two of them",
        temperature=0,
        max_output_tokens=40,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    (part,) = response["output"][0]["content"]
    assert part["text"] == text
    count = len(part["logprobs"])  # bytes at the end that are no character are not in the text
    assert len(scores) - 3 <= count <= len(scores)
    for one, other in zip(part["logprobs"], scores[:count], strict=True):
        assert one["token"] == other["token"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
    message = await ask(service, "/v1/messages", messages=MESSAGES, temperature=0, max_tokens=40)
    assert message["content"] == [{"type": "text", "text": text}]
    assert (response["status"], message["stop_reason"]) == ("incomplete", "max_tokens")


async def test_a_forced_call_is_the_same_at_all_endpoints(service):
    sampling = {"temperature": 1.0, "seed": 3}
    name = {"type": "function", "function": {"name": "order"}}
    found = await chat(service, tools=TOOLS, tool_choice=name)
    said = json.loads(found["message"]["tool_calls"][0]["function"]["arguments"])
    flat = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
    choice = {"type": "function", "name": "order"}
    limit = {"max_output_tokens": 1800, **sampling}
    response = await ask(service, "/v1/responses", input=MESSAGES, tools=flat, tool_choice=choice, **limit)
    (call,) = response["output"]
    assert json.loads(call["arguments"]) == said
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in flat]
    fields = {"tools": tools, "tool_choice": {"type": "tool", "name": "order"}, "max_tokens": 1800, **sampling}
    message = await ask(service, "/v1/messages", messages=MESSAGES, **fields)
    (block,) = message["content"]
    assert (block["input"], message["stop_reason"]) == (said, "tool_use")
