"""Streams in portions that do not mirror the rounds, and padded to a few sizes."""

import asyncio
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.gateway.answers.piece import Piece
from cluster.gateway.answers.streams import (
    AS_IT_COMES,
    SIZES,
    StreamShape,
    pad,
    padded_json,
    padded_size,
    shaped,
    stream_shape,
)
from cluster.gateway.paceline.v1.inference_pb2 import GenerateChunk
from cluster.gateway_config import GatewayConfig

ROUNDS = st.lists(st.lists(st.sampled_from(["a", "bc", "", "\n", "é", "😀"]), max_size=9), min_size=1, max_size=12)


async def answer(rounds, error=None, pauses=0.0):
    """A piece a token, a round after another; the last one ends it."""
    tokens = [(number, text) for number, texts in enumerate(rounds) for text in texts]
    before = 0
    for number, text in tokens:
        if number != before:
            await asyncio.sleep(pauses)
            before = number
        yield Piece(0, text)
    if error is not None:
        raise error
    yield Piece(0, "!", "stop", len(tokens) + 1)


async def collected(pieces):
    found = []
    try:
        async for piece in pieces:
            found.append(piece)
    except ZeroDivisionError as error:
        return found, error
    return found, None


@given(ROUNDS, st.integers(1, 7))
def test_chunks_of_so_many_tokens_hold_just_those_and_the_text_is_the_same(rounds, num_tokens):
    tokens = [text for texts in rounds for text in texts] + ["!"]
    found, _ = asyncio.run(collected(shaped(answer(rounds), StreamShape(num_tokens=num_tokens))))
    whole = ["".join(tokens[i : i + num_tokens]) for i in range(0, len(tokens), num_tokens)]
    assert [piece.text for piece in found] == [text for text in whole if text]
    assert [piece.finish_reason for piece in found] == [None] * (len(found) - 1) + ["stop"]
    assert found[-1].num_completion_tokens == len(tokens)


@given(ROUNDS, st.integers(0, 5))
def test_what_came_before_an_error_is_sent_before_it(rounds, num_tokens):
    shape = StreamShape(interval_s=0.001 if num_tokens % 2 else 0.0, num_tokens=num_tokens)
    if shape == AS_IT_COMES:
        shape = StreamShape(interval_s=0.001)
    found, error = asyncio.run(collected(shaped(answer(rounds, ZeroDivisionError()), shape)))
    assert "".join(piece.text for piece in found) == "".join(text for texts in rounds for text in texts)
    assert error is not None


class Clock:
    """Time of an event loop that does not wait for it."""

    def __init__(self, loop):
        self.now = 0.0
        self.select = loop._selector.select
        loop.time = lambda: self.now
        loop._selector.select = self.skip

    def skip(self, timeout):
        if timeout is not None and timeout > 0:
            self.now += timeout
        return self.select(0)


def in_no_time(coroutine):
    with asyncio.Runner() as runner:
        Clock(runner.get_loop())
        return runner.run(coroutine)


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_chunks_leave_at_multiples_of_the_interval_whenever_rounds_end(num_tokens):
    async def times(rounds, pauses):
        clock = asyncio.get_running_loop().time
        found = []
        async for piece in shaped(answer(rounds, pauses=pauses), StreamShape(0.1, num_tokens)):
            found.append((round(clock(), 6), piece.text))
        return found

    rounds = [["a", "b", "c"], ["d"], ["e", "f", "g", "h"], ["i"], ["j", "k"]]
    for pauses in (0.0, 0.013, 0.04, 0.37):
        found = in_no_time(times(rounds, pauses))
        assert "".join(text for _, text in found) == "abcdefghijk!"
        assert all(time * 10 == pytest.approx(round(time * 10)) for time, _ in found)
        assert len({time for time, _ in found}) == len(found)
        if num_tokens:
            assert [len(text) for _, text in found] == [2] * 6
    if num_tokens:  # made faster than it is sent, it tells nothing of its rounds
        assert in_no_time(times(rounds, 0.001)) == in_no_time(times([["a"], [*"bcdefghijk"]], 0.0))


def test_whoever_leaves_a_shaped_stream_closes_what_it_is_made_of():
    closed = []

    async def endless():
        try:
            while True:
                yield Piece(0, "x")
                await asyncio.sleep(0.001)
        finally:
            closed.append(True)

    async def leave(shape):
        pieces = shaped(endless(), shape)
        await anext(pieces)
        await pieces.aclose()

    for shape in (StreamShape(0.01), StreamShape(0.01, 3), StreamShape(num_tokens=3)):
        asyncio.run(leave(shape))
    assert len(closed) == 3


def test_shapes_are_for_clusters_with_tenants_unless_they_are_configured():
    plain, told = GatewayConfig(), GatewayConfig(stream_interval_ms=0, stream_tokens=8, stream_obfuscation=False)
    assert stream_shape(plain, False, None) == AS_IT_COMES
    assert stream_shape(plain, True, None) == StreamShape(0.1, 0, True)
    assert stream_shape(plain, True, False) == StreamShape(0.1, 0, False)
    assert stream_shape(plain, False, True) == StreamShape(0.0, 0, True)
    assert stream_shape(told, True, None) == StreamShape(0.0, 8, False)


@given(st.text(max_size=2000))
def test_json_is_padded_to_one_of_the_sizes_and_says_the_same(text):
    encoded = json.dumps({"text": text}, ensure_ascii=False).encode(errors="surrogatepass")
    padded = padded_json(encoded)
    assert len(padded) in SIZES
    assert padded.startswith(encoded[:-1])
    assert re.fullmatch(rb',"obfuscation":"[A-Za-z0-9_-]*"}', padded[len(encoded) - 1 :])


@given(st.integers(0, 3000))
def test_messages_are_padded_to_one_of_the_sizes(length):
    chunk = GenerateChunk(id="x", text="y" * length)
    pad(chunk)
    assert chunk.ByteSize() in SIZES
    assert chunk.obfuscation
    assert len(GenerateChunk.FromString(chunk.SerializeToString()).text) == length


def test_padding_is_not_the_same_twice_and_what_is_longer_than_all_sizes_is_a_multiple():
    assert padded_json(b'{"a":1}') != padded_json(b'{"a":1}')
    assert [padded_size(size) for size in (1, 512, 513, SIZES[-1], SIZES[-1] + 1)] == [
        512, 512, 1024, SIZES[-1], 2 * SIZES[-1],
    ]  # fmt: skip
