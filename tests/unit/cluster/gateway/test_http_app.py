"""The HTTP face in process: answers, streams, limits and errors, over an echoing router.

Covers `cluster.gateway.answers`, `cluster.gateway.openai.answer`, `cluster.gateway.requests`,
`cluster.gateway.service` and `cluster.validation`, too.
"""

import asyncio
import json
from dataclasses import replace

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import DeadlineExceeded, LinkError, Overloaded, Unavailable
from cluster.gateway.http_app import create_app
from cluster.gateway.requests.call import GenerationCall
from cluster.gateway.requests.chat_schema import ChatBody
from cluster.gateway.requests.schema import CompletionBody
from cluster.gateway.service import GenerationService
from cluster.routing.router_status import RouterStatus
from paceline_testing.echo_gateway import gateway_client, until
from paceline_testing.echo_router import EchoRouter
from paceline_testing.toy_gateway import CONFIG, END, FOX, MODEL, TOKENIZER, chat, complete, error_of, events, tokens

JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def official(client):
    async with openai.AsyncOpenAI(
        api_key="-", base_url="http://localhost/v1", http_client=client, max_retries=0
    ) as official:
        yield official


async def test_a_completion_has_text_usage_and_a_finish_reason(client):
    count = len(tokens(FOX))
    answer = (await complete(client, max_tokens=count)).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": FOX, "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": count,
        "completion_tokens": count,
        "total_tokens": 2 * count,
        "prompt_tokens_details": {"cached_tokens": count // 2},
    }
    assert "speculation" not in answer


async def test_a_streamed_completion_has_the_same_text_as_a_whole_one(client):
    whole = (await complete(client, max_tokens=50)).json()
    chunks = events(await complete(client, max_tokens=50, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert len(chunks) > 5
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_in_a_chunk_of_its_own_when_asked_for(client):
    chunks = events(await complete(client, max_tokens=9, stream=True, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 9


async def test_the_first_chat_chunk_carries_the_role(client):
    chunks = events(await chat(client, stream=True, max_tokens=12))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])


async def test_a_chat_goes_through_the_template_and_ends_at_the_end_token(client, router):
    answer = (await chat(client)).json()
    # The echo repeats the rendered prompt, whose first end token follows the user's message.
    assert answer["choices"][0]["message"]["content"] == "user\nhello"
    assert answer["choices"][0]["finish_reason"] == "stop"
    ids = router.requests[0].prompt_token_ids.tolist()
    assert TOKENIZER.decode(ids) == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"


async def test_the_official_client_works_for_both_endpoints(official):
    count = len(tokens(FOX))
    whole = await official.completions.create(model="toy", prompt=FOX, temperature=0, max_tokens=count)
    assert whole.choices[0].text == FOX
    assert whole.usage.prompt_tokens_details.cached_tokens == count // 2
    stream = await official.completions.create(model="toy", prompt=FOX, temperature=0, max_tokens=count, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == FOX
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    answer = await official.chat.completions.create(
        model="toy", messages=messages, temperature=0, max_completion_tokens=3, stop=["zzz"], seed=-5, user="me"
    )
    assert answer.usage.completion_tokens == 3
    stream = await official.chat.completions.create(
        model="toy", messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.total_tokens > 0
    assert [model.id async for model in official.models.list()] == ["toy"]
    assert (await official.models.retrieve("toy")).created == 1


async def test_the_official_client_raises_its_own_errors(official, router):
    with pytest.raises(openai.NotFoundError, match="the model served here is 'toy'"):
        await official.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature is 3"):
        await official.completions.create(model="toy", prompt="x", temperature=3)
    router.max_running = 0
    with pytest.raises(openai.RateLimitError):
        await official.completions.create(model="toy", prompt="x")
    router.max_running = 10
    router.failures.append((6, LinkError("the link broke")))
    stream = await official.completions.create(model="toy", prompt=FOX, stream=True)
    with pytest.raises(openai.APIError, match="the link broke"):
        async for _ in stream:
            pass


async def test_prompts_may_be_token_ids_and_several(client):
    one, two = tokens("one two"), tokens("three")
    for prompt, texts in (
        (one, ["one two"]),
        ([one, two], ["one two", "three"]),
        (["one two", "three"], ["one two", "three"]),
    ):
        answer = (await complete(client, prompt=prompt, max_tokens=30)).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
        for choice, text in zip(answer["choices"], texts, strict=True):
            assert choice["text"].startswith(text)
        assert answer["usage"]["prompt_tokens"] == len(one) + (len(two) if len(texts) == 2 else 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_n_answers_have_consecutive_seeds(client, router, stream):
    response = await complete(client, n=3, seed=7, temperature=1, max_tokens=8, stream=stream)
    if stream:
        texts = ["", "", ""]
        for chunk in events(response):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    else:
        texts = [choice["text"] for choice in response.json()["choices"]]
    assert sorted(request.sampling.seed for request in router.requests) == [7, 8, 9]
    assert len(set(texts)) == 3
    for offset, text in enumerate(texts):
        alone = (await complete(client, seed=7 + offset, temperature=1, max_tokens=8)).json()
        assert alone["choices"][0]["text"] == text


async def test_seeds_are_drawn_or_taken_as_unsigned(client, router):
    for fields in ({}, {}, {"seed": -1}, {"seed": 0}):
        await complete(client, max_tokens=1, **fields)
    first, second, negative, zero = (request.sampling.seed for request in router.requests)
    assert first != second
    assert max(first, second) > 2**32  # 64 bits are drawn; fails once in 2**64 runs
    assert (negative, zero) == (2**64 - 1, 0)


async def test_the_defaults_are_those_of_openai_and_every_parameter_arrives(client, router):
    await client.post("/v1/completions", json={"prompt": "x"})
    sampling = router.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert router.requests[-1].max_new_tokens == CONFIG.default_max_tokens
    assert router.requests[-1].stop_token_ids == (END,)
    await complete(
        client, max_tokens=5, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.1, logit_bias={"5": -100, "6": 1.5}, ignore_eos=True, stop_token_ids=[9],
        speculation={"drafters": ["suffix"], "max_draft_tokens": 3},
    )  # fmt: skip
    request = router.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.1)
    assert sampling.logit_bias == ((5, -100.0), (6, 1.5))
    assert request.stop_token_ids == (9,)
    assert (request.drafters, request.max_draft_tokens, request.max_new_tokens) == (("suffix",), 3, 5)
    await complete(client, speculation={"drafters": ["auto", "draft_model"]})
    assert router.requests[-1].drafters == ("auto", "draft_model")
    await complete(client, speculation={"enabled": False})
    assert router.requests[-1].drafters == ()
    await complete(client, top_k=-1, temperature=None, stop=None, logit_bias=None, n=None, speculation=None)
    assert router.requests[-1].sampling.top_k == 0


async def test_a_request_may_name_a_further_draft_model_of_the_cluster(client, service, router):
    service.model = replace(MODEL, drafters=(*MODEL.drafters, "draft_model.code"))
    await complete(client, speculation={"drafters": ["draft_model.code"]})
    assert router.requests[-1].drafters == ("draft_model.code",)
    error = error_of(await complete(client, speculation={"drafters": ["draft_model.prose"]}), 400)
    assert error["message"].endswith("draft_model.code")  # the last of those that are known


async def test_speculation_statistics_come_when_asked_for(client):
    answer = (await complete(client, max_tokens=9, speculation={"stats": True})).json()
    count = len(tokens(FOX))
    assert answer["speculation"] == {
        "rounds": 3, "target_rows": count + 9, "draft_tokens": 6, "accepted_tokens": {"echo": 6},
    }  # fmt: skip
    for options in (None, {"include_usage": True}):
        fields = {"max_tokens": 9, "stream": True, "stream_options": options, "speculation": {"stats": True}}
        chunks = events(await complete(client, **fields))
        assert chunks[-1]["speculation"] == answer["speculation"]
        assert all("speculation" not in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("stop", ["fox", ["wn f", "zzz"], "n fox 😀", ["😀"]])
async def test_a_stop_string_never_shows_and_counts_the_same_for_any_chunks(client, router, chunk_tokens, stop):
    text = "one two brown fox 😀 five six"
    router.chunk_tokens = chunk_tokens
    expected = min(text.find(one) for one in ([stop] if isinstance(stop, str) else stop) if one in text)
    answer = (await complete(client, prompt=text, stop=stop, max_tokens=60)).json()
    assert answer["choices"][0] == {"index": 0, "text": text[:expected], "logprobs": None, "finish_reason": "stop"}
    router.chunk_tokens = 1
    by_token = (await complete(client, prompt=text, stop=stop, max_tokens=60)).json()
    assert answer["usage"]["completion_tokens"] == by_token["usage"]["completion_tokens"]
    router.chunk_tokens = chunk_tokens
    chunks = events(await complete(client, prompt=text, stop=stop, max_tokens=60, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[:expected]


async def test_a_stop_string_ends_the_routers_stream(client, router):
    router.delay_s = 0.01
    await complete(client, stop="fox", max_tokens=128)
    await until(lambda: not router.running)
    assert router.num_cancelled == 1


@pytest.mark.parametrize("chunk_tokens", [2, 3, 5])
async def test_an_answer_that_a_stop_string_ends_has_the_statistics_of_what_was_computed(client, router, chunk_tokens):
    router.chunk_tokens = chunk_tokens
    fields = {"prompt": f"{FOX} {FOX}", "max_tokens": 60, "stop": "x the", "speculation": {"stats": True}}
    answer = (await complete(client, **fields)).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    num_tokens = answer["usage"]["completion_tokens"]
    rounds = -(-num_tokens // chunk_tokens)
    assert answer["speculation"] == {
        "rounds": rounds,
        "target_rows": answer["usage"]["prompt_tokens"] + rounds * chunk_tokens,
        "draft_tokens": rounds * (chunk_tokens - 1),
        "accepted_tokens": {"echo": num_tokens - num_tokens // chunk_tokens},  # none of those behind the stop string
    }
    chunks = events(await complete(client, stream=True, **fields))
    assert chunks[-1]["speculation"] == answer["speculation"]


async def test_text_held_back_for_a_stop_string_is_shown_at_the_end(client):
    answer = (await complete(client, stop=FOX[-3:] + " never", max_tokens=len(tokens(FOX)))).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (FOX, "length")


async def test_a_stop_token_ends_the_answer_without_its_text(client):
    fox = tokens(FOX)
    answer = (await complete(client, stop_token_ids=[fox[-1]], max_tokens=60)).json()
    assert answer["choices"][0]["text"] == TOKENIZER.decode(fox[:-1])
    assert answer["choices"][0]["finish_reason"] == "stop"


REFUSED = [
    ({"temperature": 2.5}, "temperature", "at most 2"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"temperature": "1"}, "temperature", "a number"),
    ({"temperature": True}, "temperature", "a number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.01}, "top_p", "at most 1"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"min_p": 2}, "min_p", "at most 1"),
    ({"seed": 2**63}, "seed", "below 9223372036854775808"),
    ({"seed": 1.5}, "seed", "a whole number"),
    ({"presence_penalty": 3}, "presence_penalty", "2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 129}, "max_tokens", "at most 128 tokens"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 33}, "n", "at most 32"),
    ({"stop": ["a"] * 17}, "stop", "is 17 strings; at most 16 are taken"),
    ({"stop": ["a", ""]}, "stop", "1 to 256"),
    ({"stop": "x" * 257}, "stop", "1 to 256"),
    ({"stop": [1]}, "stop", "string"),
    ({"stop_token_ids": [100_000]}, "stop_token_ids", "token ids are from 0 to"),
    ({"logit_bias": {"100000": 1}}, "logit_bias", "token ids are from 0 to"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "at most 100"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "match"),
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": []}, "prompt", "at least one token"),
    ({"prompt": ["a", ""]}, "prompt", "at least one token"),
    ({"prompt": [[]]}, "prompt", "at least one token"),
    ({"prompt": [1, "a"]}, "prompt", "a string, a list of strings"),
    ({"prompt": 5}, "prompt", "a string, a list of strings"),
    ({"prompt": [-1]}, "prompt", "token ids are from 0 to"),
    ({"prompt": [2**40]}, "prompt", "token ids are from 0 to"),
    ({"prompt": None}, "prompt", "a string, a list of strings"),
    ({"best_of": 0}, "best_of", "at least 1"),
    ({"logprobs": 21}, "logprobs", "at most 20"),
    ({"logprobs": True}, "logprobs", "a whole number"),
    ({"max_tokens": 0}, "max_tokens", "0 needs echo"),
    ({"tools": []}, "tools", "no such parameter"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    ({"stream_options": {"x": 1}}, "stream_options.x", "no such parameter"),
    ({"speculation": {"drafters": ["../x"]}}, "speculation.drafters[0]", "match"),
    ({"speculation": {"drafters": ["oracle"]}}, "speculation.drafters", "known drafters are auto, none"),
    (
        {"speculation": {"drafters": ["suffix", "prompt_lookup"]}},
        "speculation.drafters",
        "here run suffix, draft_model",
    ),
    ({"speculation": {"drafters": ["none", "suffix"]}}, "speculation.drafters", "excludes every other"),
    ({"speculation": {"max_draft_tokens": 300}}, "speculation.max_draft_tokens", "256"),
    ({"speculation": {"status": True}}, "speculation.status", "no such parameter"),
    ({"speculation": {"sources": ["oracle"]}}, "speculation.drafters", "known drafters are auto, none"),
    ({"speculation": {"sources": ["suffix"], "drafters": ["auto"]}}, "speculation.sources", "says otherwise"),
    ({"speculation": {"cache": "write"}}, "speculation.cache", "'off', 'read' or 'read_write'"),
    ({"speculation": {"namespace": "a.b"}}, "speculation.namespace", "match"),
    ({"speculation": {"namespace": "a" * 33}}, "speculation.namespace", "match"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"cache_salt": "x" * 257}, "cache_salt", "it must have at most 256"),
    ({"wibble": 1}, "wibble", "no such parameter"),
    ({"stream": "yes"}, "stream", "true or false"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=lambda value: str(value)[:40])
async def test_a_bad_value_is_refused_naming_field_and_limit(client, router, fields, param, words):
    error = error_of(await complete(client, **fields), 400)
    assert error["param"] == param
    assert words in error["message"]
    assert error["message"].startswith(param)
    assert error["type"] == "invalid_request_error"
    assert router.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user"}], "prompt": "x"}, "prompt"),
        ({"max_completion_tokens": 500}, "max_completion_tokens"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
        ({"prediction": {"type": "tokens", "content": "x"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": "x"}, "prediction"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_is_wrong_or_not_supported_in_a_chat_is_named(client, router, fields, param):
    assert error_of(await chat(client, **fields), 400)["param"] == param
    assert router.requests == []


@pytest.mark.parametrize("content", ["say it", [{"type": "text", "text": "say "}, {"type": "text", "text": "it"}]])
async def test_a_prediction_reaches_the_router_as_tokens(client, router, content):
    response = await chat(client, prediction={"type": "content", "content": content}, max_tokens=3)
    assert response.status_code == 200, response.text
    assert router.requests[-1].prediction_token_ids.tolist() == tokens("say it")
    assert (await complete(client, max_tokens=3)).status_code == 200
    assert len(router.requests[-1].prediction_token_ids) == 0


@pytest.mark.parametrize(
    ("fields", "service_class", "told"),
    [
        ({}, "interactive", "default"),
        ({"service_tier": "auto"}, "interactive", "default"),
        ({"service_tier": "priority"}, "interactive", "default"),
        ({"service_tier": "fast"}, "interactive", "default"),
        ({"service_tier": "flex"}, "batch", "flex"),
    ],
)
async def test_a_service_tier_is_a_class_and_the_answer_names_the_tier_that_was_served(
    client, router, fields, service_class, told
):
    response = await chat(client, max_tokens=3, **fields)
    assert response.json()["service_tier"] == told
    assert router.requests[-1].service_class == service_class
    chunks = events(await chat(client, stream=True, max_tokens=3, **fields))
    assert {chunk["service_tier"] for chunk in chunks} == {told}
    assert (await complete(client, max_tokens=3, **fields)).status_code == 200
    assert router.requests[-1].service_class == service_class


async def test_harmless_values_of_unsupported_fields_are_accepted(client):
    response = await chat(
        client, tools=None, tool_choice="auto", logprobs=False, top_logprobs=0, response_format={"type": "text"},
        audio=None, modalities=["text"], store=False, metadata={"a": "b"},
        parallel_tool_calls=True, service_tier="auto",
        prompt_cache_key="k", max_tokens=3,
    )  # fmt: skip
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "top_p": NaN}',
        b'{"prompt": "x", "temperature": Infinity}', b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", b'{"prompt": "x", "seed": ' + b"9" * 6000 + b"}",
        b'{"prompt": "x", "n": ' + b"9" * 4000 + b"}", b"\x00\x01\x02", '{"prompt": "x"}'.encode("utf-16"),
    ],
    ids=lambda body: str(body[:24]),
)  # fmt: skip
async def test_a_body_that_is_not_clean_json_is_a_400(client, router, body):
    error_of(await client.post("/v1/completions", content=body, headers=JSON), 400)
    assert router.requests == []


async def test_a_huge_body_is_refused_declared_or_not(client):
    big = b'{"prompt": "' + b"x" * 30_000 + b'"}'
    assert error_of(await client.post("/v1/completions", content=big, headers=JSON), 413)["code"] == "body_too_large"

    async def parts():
        for _ in range(1000):
            yield b"x" * 100

    assert (
        "20000 bytes" in error_of(await client.post("/v1/completions", content=parts(), headers=JSON), 413)["message"]
    )


async def test_a_prompt_longer_than_the_model_is_refused_before_any_work(client, router):
    error = error_of(await complete(client, prompt=[5] * 256), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "256" in error["message"]
    error = error_of(await complete(client, prompt=[5] * 200, max_tokens=57), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert error["message"] == "max_tokens is 57; with the 200 tokens of the prompt it exceeds the limit of 256 tokens"
    long_chat = [{"role": "user", "content": "hello " * 2000}]
    assert error_of(await chat(client, messages=long_chat), 400)["param"] == "messages"
    assert router.requests == []
    assert (await complete(client, prompt=[5] * 255)).json()["usage"]["completion_tokens"] == 1


async def test_of_an_encoder_decoder_model_prompt_and_answer_have_a_limit_each(client, service, router):
    service.model = replace(MODEL, max_side_len=100)
    assert error_of(await complete(client, prompt=[5] * 101), 400)["param"] == "prompt"
    error = error_of(await complete(client, prompt=[5] * 50, max_tokens=101), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert router.requests == []
    assert (await complete(client, prompt=[5] * 100, max_tokens=100)).status_code == 200


async def test_an_encoder_decoder_model_has_no_log_probabilities_of_its_prompt(client, service, router):
    service.model = replace(MODEL, max_side_len=100)
    error = error_of(await complete(client, echo=True, logprobs=2), 400)
    assert (error["code"], error["param"]) == ("unsupported_value", "logprobs")
    assert "send it without echo" in error["message"]
    error = error_of(await complete(client, prompt_logprobs=2), 400)
    assert (error["code"], error["param"]) == ("unsupported_value", "prompt_logprobs")
    assert router.requests == []


async def test_a_stream_has_no_log_probabilities_of_its_prompt(client, router):
    for send in (complete, chat):
        error = error_of(await send(client, stream=True, prompt_logprobs=0), 400)
        assert (error["code"], error["param"]) == ("unsupported_value", "prompt_logprobs")
        assert "leave out stream" in error["message"]
        assert error_of(await send(client, prompt_logprobs=21), 400)["param"] == "prompt_logprobs"
        assert error_of(await send(client, prompt_logprobs=True), 400)["param"] == "prompt_logprobs"
    assert router.requests == []
    assert "prompt_logprobs" not in (await complete(client, stream=True, prompt_logprobs=False)).text


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_lone_surrogates_in_arguments_are_refused_by_their_place(client, path):
    arguments = '{"a": "\\ud800"}'
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
    body, field = {"input": [item]}, "input[0].arguments"
    if path == "chat/completions":
        body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
        field = "messages[0].tool_calls[0].function.arguments"
    error = error_of(await client.post(f"/v1/{path}", json=body), 400)
    assert error["param"] == field
    assert "valid Unicode" in error["message"]


@pytest.mark.parametrize("learns", ["from a probe", "by itself"])
async def test_the_limit_of_the_router_is_the_gateways(client, service, router, learns):
    router.max_model_len = 64
    if learns == "from a probe":
        await client.get("/readyz")
    else:
        following = asyncio.create_task(service.follow_router(0.01))
        await asyncio.sleep(0.1)
        router.max_model_len = 48
        await asyncio.sleep(0.1)
        following.cancel()
    limit = router.max_model_len
    assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == limit
    assert error_of(await complete(client, prompt=[5] * limit), 400)["param"] == "prompt"
    assert error_of(await complete(client, prompt=[5] * 40, max_tokens=limit - 39), 400)["param"] == "max_tokens"
    error = error_of(await chat(client, messages=[{"role": "user", "content": "hello " * 60}]), 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert router.requests == []
    assert (await complete(client, prompt=[5] * 40, max_tokens=limit - 40)).status_code == 200


async def test_a_call_keeps_the_limit_that_it_began_with(service, router):
    prediction = "hello " * 1000  # long enough to be tokenised in a thread
    call = GenerationCall(prompts=((5,) * 100,), prediction=prediction)
    preparing = asyncio.create_task(service.prepare(call, "call"))
    await asyncio.sleep(0)
    router.max_model_len = 64
    await service.router_status()
    assert service.model.max_model_len == 64
    (request,) = (await preparing).requests
    assert (request.max_new_tokens, len(request.prediction_token_ids)) == (16, 256)


async def test_the_router_is_followed_through_its_absence(client, service, router, monkeypatch):
    failures = [Unavailable("no router"), Overloaded("full", 1.0), RuntimeError("a bug")]

    async def status() -> RouterStatus:
        if failures:
            raise failures.pop()
        return RouterStatus(ready=True, live=True, max_model_len=80)

    monkeypatch.setattr(router, "status", status)
    following = asyncio.create_task(service.follow_router(0.01))
    await asyncio.sleep(0.2)
    following.cancel()
    assert service.model.max_model_len == 80


async def test_errors_never_repeat_the_prompt(client):
    secret = "a secret of mine"
    for fields in ({"prompt": [secret, 1]}, {"prompt": {secret: 1}}):
        assert secret not in (await complete(client, **fields)).text
    response = await chat(client, messages=[{"role": "user", "content": [{"type": "text", "txet": secret}]}])
    assert secret not in response.text
    error = error_of(await chat(client, messages=[{"role": "wizard", "content": secret}]), 400)
    assert error["message"].startswith("messages[0].role is 'wizard'; it must be 'system', ")


async def test_unknown_routes_and_methods_have_error_objects(client):
    assert error_of(await client.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(await client.get("/v1/completions"), 405)["code"] == "method_not_allowed"
    assert error_of(await client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert error_of(await complete(client, model="other"), 404)["param"] == "model"


FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, "tools", "logprobs", "echo", "nonsense"})
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FIELDS, "content", "role"]), inner),
    max_leaves=6,
)


@pytest.mark.whole
@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["completions", "chat/completions"]),
            st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES),
        ),
        min_size=5,
        max_size=8,
    )
)
async def test_no_body_whatsoever_breaks_the_gateway(bodies):
    service = GenerationService(EchoRouter(), TOKENIZER, MODEL, CONFIG)
    async with gateway_client(service, CONFIG) as client:
        for path, fields in bodies:
            base = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
            content = json.dumps({**base, **fields}, ensure_ascii=False).encode()
            response = await client.post(f"/v1/{path}", content=content, headers=JSON)
            if response.status_code != 200:
                assert error_of(response, response.status_code)["message"]
            assert response.status_code in (200, 400, 404)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_router_that_is_full_or_refuses_says_when_to_come_again(client, router, stream):
    router.failures.append((0, Unavailable("draining")))
    response = await complete(client, stream=stream)
    assert "draining" in error_of(response, 503)["message"]
    assert response.headers["retry-after"] == "1"
    router.max_running = 0
    response = await complete(client, stream=stream)
    assert error_of(response, 429)["code"] == "overloaded"
    assert response.headers["retry-after"] == "3"


async def test_a_passed_deadline_is_a_504_and_frees_the_sequence(client, router):
    router.delay_s = 0.05
    response = await complete(client, "0.3", max_tokens=100)
    assert error_of(response, 504)["code"] == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false"
    assert 0.2 < router.requests[0].timeout_s <= 0.3
    await until(lambda: not router.running)
    router.failures.append((0, DeadlineExceeded("too late")))
    assert error_of(await complete(client), 504)["message"] == "too late"
    for wrong in ("soon", "-1", "nan", "inf"):
        assert error_of(await complete(client, wrong), 400)["param"] == "x-request-timeout-seconds"


async def test_an_error_in_a_stream_is_told_and_ends_it(client, router):
    router.failures.append((6, LinkError("the link broke")))
    response = await complete(client, stream=True)
    blocks = [json.loads(block.removeprefix("data: ")) for block in response.text.split("\n\n") if block]
    assert len(blocks) == 3
    assert blocks[-1]["error"]["message"] == "the link broke"


async def test_an_unforeseen_error_is_a_500_that_tells_nothing(client, router, caplog):
    router.failures.append((0, RuntimeError("a secret path")))
    response = await complete(client)
    assert error_of(response, 500)["message"] == "internal error"
    assert "a secret path" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_survives_the_loss_of_its_router(client, router, stream):
    fields = {"max_tokens": 40, "seed": 3, "temperature": 1, "stream": stream}
    undisturbed = (await complete(client, **fields)).text
    router.failures += [(6, Unavailable("lost")), (9, Unavailable("lost again"))]
    resumed = (await complete(client, **fields)).text

    def text_of(answer):
        if not stream:
            return json.loads(answer)["choices"][0]["text"], json.loads(answer)["usage"]["completion_tokens"]
        blocks = [json.loads(block[6:]) for block in answer.split("\n\n") if block and "[DONE]" not in block]
        return "".join(block["choices"][0]["text"] for block in blocks), None

    assert text_of(resumed) == text_of(undisturbed)
    parts = router.requests[1:]
    assert [part.num_output_in_prompt for part in parts] == [0, 6, 15]
    assert [part.max_new_tokens for part in parts] == [40, 34, 25]
    assert len({part.request_id for part in parts}) == 3  # a router that is not dead may still run the part before


async def test_a_stream_waits_when_the_router_that_is_to_carry_it_on_is_full(client, router):
    whole = (await complete(client, max_tokens=40)).json()["choices"][0]["text"]
    router.failures += [(6, Unavailable("lost"))] + [(0, Overloaded("full", 0.01))] * 6
    response = await complete(client, max_tokens=40, stream=True)
    assert "".join(event["choices"][0]["text"] for event in events(response)) == whole
    assert [part.num_output_in_prompt for part in router.requests[1:]] == [0] + [6] * 7


async def test_a_stream_waits_for_a_place_no_longer_than_until_its_deadline(client, router):
    router.failures += [(6, Unavailable("lost")), (0, Overloaded("full", 60.0))]
    assert error_of(await complete(client, "0.4", max_tokens=40), 504)["code"] == "deadline_exceeded"


async def test_a_stream_whose_routers_keep_failing_ends_with_its_error(client, router):
    router.failures += [(3, Unavailable("lost"))] + [(0, Unavailable("gone"))] * 10
    assert (await complete(client, "1", max_tokens=90)).status_code in (503, 504)
    assert len(router.requests) < 6


async def test_a_client_that_goes_away_closes_the_routers_streams(service, router):
    router.delay_s = 0.05
    app = create_app(service, CONFIG)
    for stream in (False, True):
        body = json.dumps({"prompt": FOX, "max_tokens": 100, "n": 3, "stream": stream}).encode()
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
                 "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
                 "path": "/v1/completions", "raw_path": b"", "query_string": b"", "root_path": "", "scheme": "http",
                 "server": ("gateway", 80), "client": ("test", 1)}  # fmt: skip
        incoming = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        sent = asyncio.Queue()
        handler = asyncio.create_task(app(scope, incoming.get, sent.put))
        await until(lambda: len(router.running) == 3)
        incoming.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(handler, 5)
        assert router.running == set()
    assert router.num_cancelled == 6
    assert 'reason="cancelled"} 6.0' in service.metrics.text()


async def test_probes_follow_the_router(client, router, monkeypatch):
    for path in ("/livez", "/readyz", "/health"):
        assert (await client.get(path)).status_code == 200
    router.ready = False
    assert [(await client.get(path)).status_code for path in ("/livez", "/readyz", "/health")] == [200, 503, 503]
    router.live = False
    assert (await client.get("/livez")).status_code == 200  # nobody is asked for this
    assert (await client.get("/readyz")).status_code == 503
    assert (await client.get("/livez")).status_code == 503

    async def lost() -> RouterStatus:
        raise Unavailable("no router")

    monkeypatch.setattr(router, "status", lost)
    assert (await client.get("/readyz")).status_code == 503
    assert (await client.get("/livez")).status_code == 200
    assert (await client.get("/version")).json()["version"]


async def test_probes_do_not_wait_for_a_router_that_was_lately_heard(client, service, router, monkeypatch):
    asked = []
    is_busy = asyncio.Event()

    async def status() -> RouterStatus:
        asked.append(1)
        if len(asked) > 1:
            is_busy.set()
            await asyncio.sleep(3600)
        return RouterStatus(ready=True, live=True)

    monkeypatch.setattr(router, "status", status)
    monkeypatch.setattr("cluster.gateway.service._RECENT_S", 3600.0)
    following = asyncio.create_task(service.follow_router(0.0))
    await is_busy.wait()
    assert [(await client.get("/readyz")).status_code for _ in range(20)] == [200] * 20
    assert len(asked) == 2
    monkeypatch.setattr("cluster.gateway.service._RECENT_S", 0.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.get("/readyz")
    following.cancel()


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/version", "/metrics", "/v1/models", "/nothing"])
async def test_head_is_get_without_the_body(client, router, path):
    for ready in (True, False):
        router.ready = ready
        whole, head = await client.get(path), await client.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert (await client.head("/v1/completions")).status_code == 405


async def test_requests_that_cannot_be_read_count_as_failures(client, service):
    await client.post("/v1/completions", content=b"{", headers=JSON)
    await client.post("/v1/chat/completions", content=b"[]", headers=JSON)
    await complete(client, temperature=9)
    await complete(client, temprature=1)
    await complete(client, "soon")
    await client.post("/v1/completions", content=b"x" * 30_000, headers=JSON)
    await complete(client, max_tokens=500)
    text = service.metrics.text()
    for reason, count in {"invalid_json": 2, "invalid_value": 3, "unknown_parameter": 1, "body_too_large": 1}.items():
        assert f'paceline_request_failure_total{{reason="{reason}"}} {count}.0' in text


async def test_metrics_count_requests_and_tokens_and_include_the_routers(client, router):
    count = len(tokens(FOX))
    await complete(client, max_tokens=9)
    await complete(client, max_tokens=9, n=2, stream=True)
    await complete(client, temperature=9)
    router.failures.append((0, Unavailable("draining")))
    await complete(client)
    text = (await client.get("/metrics")).text
    for line in (
        'paceline_request_success_total{finished_reason="length"} 3.0',
        'paceline_request_failure_total{reason="unavailable"} 1.0',
        "paceline_num_requests_running 0.0",
        "paceline_num_requests_waiting 0.0",
        f"paceline_prompt_tokens_total {4 * count}.0",
        "paceline_generation_tokens_total 27.0",
        "paceline_time_to_first_token_seconds_count 3.0",
        "paceline_inter_token_latency_seconds_count 24.0",
        "paceline_e2e_request_latency_seconds_count 3.0",
        "echo_running 0",
    ):
        assert line in text, line


async def test_the_openapi_document_describes_both_bodies(client):
    document = (await client.get("/openapi.json")).json()
    assert set(document["paths"]) >= {"/v1/completions", "/v1/chat/completions", "/v1/models", "/readyz", "/metrics"}
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in document["components"]["schemas"]
    assert "speculation" in document["components"]["schemas"]["CompletionBody"]["properties"]
