"""`speculation.token_sources`: who proposed each token of an answer, over an echoing router."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.gateway.answers.token_sources import TextSources
from cluster.gateway.served_model import ServedModel
from cluster.gateway.service import GenerationService
from cluster.gateway_config import GatewayConfig
from paceline_testing.echo_gateway import gateway_client
from paceline_testing.echo_router import EchoRouter
from paceline_testing.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
EOS = TOKENIZER.convert_tokens_to_ids("<|end|>")
MODEL = ServedModel("toy", max_model_len=512, vocab_size=len(TOKENIZER), eos_token_ids=(EOS,))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def ask(path, text, chunk_tokens=3, config=None, **fields):
    """The answer, or its chunks where it is streamed."""
    config = config or GatewayConfig()
    service = GenerationService(EchoRouter(chunk_tokens), TOKENIZER, MODEL, config)
    said = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    async with gateway_client(service, config) as client:
        answer = await client.post(path, json={**said, "temperature": 0, "max_tokens": 40, **fields})
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        return answer.json()
    blocks = [block.removeprefix("data: ") for block in answer.text.split("\n\n") if block]
    assert blocks.pop() == "[DONE]"
    return [json.loads(block) for block in blocks]


def text_of(choice):
    for kind in ("message", "delta"):
        if kind in choice:
            return choice[kind].get("content", "")
    return choice["text"]


def said(pairs):
    return "".join(text for text, _ in pairs)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_sources_of_tokens_come_only_when_asked_for(path):
    for fields in ({}, {"speculation": {"stats": True}}):
        assert "token_sources" not in json.dumps(await ask(path, "the quick brown fox", **fields))
        assert "token_sources" not in json.dumps(await ask(path, "the quick brown fox", stream=True, **fields))


async def test_each_token_has_the_name_of_who_proposed_it():
    answer = await ask(COMPLETIONS, "one two three four five", 3, max_tokens=7, speculation={"token_sources": True})
    tokens = ["one", " two", " three", " four", " five", "one", " two"]
    by = ["echo", "echo", "target"] * 2 + ["target"]
    assert answer["choices"][0]["token_sources"] == [list(pair) for pair in zip(tokens, by, strict=True)]


async def test_every_answer_has_the_sources_of_its_own_tokens():
    fields = {"n": 3, "max_tokens": 5, "temperature": 1, "seed": 0, "speculation": {"token_sources": True}}
    whole = (await ask(COMPLETIONS, "one two three four five", **fields))["choices"]
    assert len({choice["text"] for choice in whole}) == 3
    assert [said(choice["token_sources"]) for choice in whole] == [choice["text"] for choice in whole]
    chunks = await ask(COMPLETIONS, "one two three four five", stream=True, **fields)
    for index, choice in enumerate(whole):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [pair for part in mine for pair in part["token_sources"]] == choice["token_sources"]


@settings(deadline=None, max_examples=60)
@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    text=st.text(st.sampled_from("ab é😀👨‍👩‍👧\n漢"), min_size=1, max_size=20),
    chunk_tokens=st.integers(1, 9),
    stream_tokens=st.sampled_from([0, 1, 4]),
    stop=st.lists(st.text(st.sampled_from("ab é😀"), min_size=1, max_size=3), max_size=2),
)
def test_the_texts_join_to_the_chunks_text(path, text, chunk_tokens, stream_tokens, stop):
    """For characters of several tokens and stop strings, however large rounds and chunks are."""
    config = GatewayConfig(stream_tokens=stream_tokens)
    wanted = {"stop": stop, "speculation": {"token_sources": True}}

    async def answers():
        return (
            await ask(path, text, chunk_tokens, config, stop=stop),
            await ask(path, text, chunk_tokens, config, **wanted),
            await ask(path, text, chunk_tokens, config, stream=True, **wanted),
        )

    plain, whole, chunks = asyncio.run(answers())
    (choice,) = whole["choices"]
    assert text_of(choice) == text_of(plain["choices"][0])
    assert whole["usage"] == plain["usage"]
    assert said(choice["token_sources"]) == text_of(choice)
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert [said(part["token_sources"]) for part in streamed] == [text_of(part) for part in streamed]
    assert "".join(text_of(part) for part in streamed) == text_of(choice)
    assert {source for _, source in choice["token_sources"]} <= {"echo", "target"}
    assert all(part for part, _ in choice["token_sources"])


def test_text_that_was_held_back_keeps_its_tokens_source():
    sources = TextSources()
    for num_chars, source in ((3, "suffix"), (0, "cache"), (2, "target")):
        sources.add(num_chars, source)
    assert sources.take("ab") == (("ab", "suffix"),)
    assert sources.take("") == ()
    assert sources.take("cde") == (("c", "suffix"), ("de", "target"))
