"""Chunks that go beside Serve, over real sockets: whatever is lost or late, each comes once and in order, or the stream
says that its router was lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import numpy as np
import pytest

from actors.errors import Overloaded, RouterLost
from actors.links.keys import LinkAddress, LinkKeys
from actors.messages import GenerationRequest, SamplingParams, TokenChunk, TokenLogprobs
from cluster.gateway.resume import generate_unbroken
from cluster.gateway.router_client import RouterClient
from cluster.routing import chunk_streams
from cluster.routing.chunk_streams import ChunkReceiver
from cluster.routing.heard_statuses import HeardStatuses
from cluster.routing.router_status import RouterStatus
from paceline_testing.linked_router import LinkedRouter

PROMPT = np.arange(7, dtype=np.int32)


def request(request_id: str = "r", num_tokens: int = 30) -> GenerationRequest:
    sampling = SamplingParams(seed=0, temperature=0.0)
    return GenerationRequest(
        request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling, max_new_tokens=num_tokens
    )


class Handle:
    """A deployment handle of one router in this process."""

    def __init__(self, router: LinkedRouter) -> None:
        self._router = router

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, request: GenerationRequest) -> Response:
        return Response(self._router.generate(request))

    def broadcast(self, method: str) -> Handle:
        return self

    async def _fetch_replica_results_async(self) -> list[Any]:
        return [self]

    async def get_async(self) -> Any:
        return await self._router.status()


class Response:
    def __init__(self, chunks: AsyncGenerator[TokenChunk, None]) -> None:
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        return self._chunks

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.fixture
def keys() -> LinkKeys:
    return LinkKeys.generate()


async def linked(keys: LinkKeys, **options: Any) -> tuple[LinkedRouter, RouterClient]:
    """A router and a client that it hears."""
    router = LinkedRouter(**options)
    router.open(keys)

    async def client_keys() -> LinkKeys:
        return keys

    client = RouterClient(Handle(router), client_keys=client_keys)
    async with asyncio.timeout(20):
        while not router.publisher.subscribers:  # type: ignore[union-attr]
            await client.status()
            await asyncio.sleep(0.02)
            router.publisher.meet()  # type: ignore[union-attr]
    return router, client


def close(router: LinkedRouter, client: RouterClient) -> None:
    client._receiver.close()  # type: ignore[union-attr]
    router.publisher.close()  # type: ignore[union-attr]


def wanted(num_tokens: int) -> list[int]:
    return [int(PROMPT[index % len(PROMPT)]) for index in range(num_tokens)]


async def test_many_streams_come_whole_and_in_order_beside_serve(keys):
    router, client = await linked(keys, chunk_tokens=2)

    async def read(number: int) -> tuple[list[int], list[int]]:
        chunks = [chunk async for chunk in client.generate(request(f"r{number}", 20 + number))]
        return [chunk.index for chunk in chunks], [token for chunk in chunks for token in chunk.token_ids]

    answers = await asyncio.gather(*(read(number) for number in range(20)))
    for number, (indices, tokens) in enumerate(answers):
        assert indices == list(range(len(indices)))
        assert tokens == wanted(20 + number)
    assert router.num_sent == sum(len(indices) - 1 for indices, _ in answers)  # the last comes through Serve
    assert client._receiver._streams == {}  # type: ignore[union-attr]
    close(router, client)


@pytest.mark.parametrize("lost", [0, 4, 13])
async def test_a_chunk_that_is_lost_costs_no_token(keys, lost, monkeypatch):
    monkeypatch.setattr(chunk_streams, "_LATE_S", 0.05)
    router, client = await linked(keys, chunk_tokens=2, loses=lambda number: number == lost)
    resumed = []
    chunks = generate_unbroken(client, request(), lambda: resumed.append(1))  # type: ignore[arg-type]
    tokens = [token async for chunk in chunks for token in chunk.token_ids]
    assert tokens == wanted(30)
    assert resumed == [1]
    close(router, client)


async def test_a_lost_chunk_is_told_as_a_lost_router(keys, monkeypatch):
    monkeypatch.setattr(chunk_streams, "_LATE_S", 0.05)
    router, client = await linked(keys, loses=lambda number: number == 2)
    got = []

    async def read() -> None:
        async for chunk in client.generate(request()):
            got.append(chunk.index)

    with pytest.raises(RouterLost, match="chunk 2"):
        await read()
    assert got == [0, 1]
    close(router, client)


async def test_errors_and_the_end_come_through_serve(keys):
    router, client = await linked(keys)
    await router.configure(failures=[])
    router.failures = [(6, Overloaded("enough", 2.0))]
    with pytest.raises(Overloaded, match="enough"):
        async for _ in client.generate(request()):
            pass
    assert router.running == set()
    close(router, client)


async def test_a_client_that_leaves_ends_the_stream(keys):
    router, client = await linked(keys, delay_s=0.01)
    chunks = client.generate(request(num_tokens=3000))
    await anext(chunks)
    await chunks.aclose()
    await asyncio.sleep(0)
    assert client._receiver._streams == {}  # type: ignore[union-attr]
    close(router, client)


async def test_a_router_that_does_not_hear_the_gateway_sends_all_through_serve(keys):
    router, client = await linked(keys)
    other = LinkedRouter()
    other.open(keys)
    client._generate = Handle(other)
    tokens = [token async for chunk in client.generate(request()) for token in chunk.token_ids]
    assert (tokens, other.num_sent) == (wanted(30), 0)
    other.publisher.close()  # type: ignore[union-attr]
    close(router, client)


async def test_a_gateway_that_is_cut_off_gets_the_rest_through_serve(keys, monkeypatch):
    """The router sees that the gateway has gone; what was on the way is lost, and the stream goes on elsewhere."""
    monkeypatch.setattr(chunk_streams, "_LATE_S", 0.05)
    router, client = await linked(keys, delay_s=0.005)
    chunks = generate_unbroken(client, request(num_tokens=90), lambda: None)  # type: ignore[arg-type]
    tokens = [*(await anext(chunks)).token_ids]
    client._receiver.follow([])  # type: ignore[union-attr]
    tokens += [token async for chunk in chunks for token in chunk.token_ids]
    assert tokens == wanted(90)
    close(router, client)


async def test_a_router_that_is_listed_no_more_is_listened_to_until_its_answers_are_over(keys):
    """It drains; another one, which is told with its news, serves."""
    router, client = await linked(keys, delay_s=0.005)
    client._pushed = HeardStatuses()
    client._pushed.follow({"other": LinkAddress("tcp://127.0.0.1:9", keys.public)}, 1)
    client._pushed.hear("other", RouterStatus(ready=True, live=True), time.monotonic())
    chunks = client.generate(request(num_tokens=90))
    tokens = [*(await anext(chunks)).token_ids]
    assert (await client.status()).ready
    tokens += [token async for chunk in chunks for token in chunk.token_ids]
    assert tokens == wanted(90)
    assert router.num_sent == 29
    close(router, client)


async def test_scores_come_with_their_tokens(keys):
    receiver = ChunkReceiver(keys)
    scores = TokenLogprobs(np.array([-0.5], np.float32), np.array([3], np.int32), np.array([-0.5], np.float32), 1)
    first = TokenChunk(request_id="r", index=0, token_ids=(3,), logprobs=scores)

    async def served() -> AsyncGenerator[TokenChunk, None]:
        receiver._hear(chunk_streams.encode_chunks([first, TokenChunk(request_id="of nobody", index=0, token_ids=())]))
        yield TokenChunk(request_id="r", index=1, token_ids=(), finish_reason="stop")

    heard = [chunk async for chunk in receiver.chunks("r", served())]
    assert [chunk.token_ids for chunk in heard] == [(3,), ()]
    assert heard[0].logprobs is not None
    assert heard[0].logprobs.chosen.tolist() == [-0.5]
    receiver.close()


async def test_a_lost_chunk_is_told_though_more_keep_coming(keys, monkeypatch):
    """The rest of the answer takes far longer than a chunk may be late."""
    monkeypatch.setattr(chunk_streams, "_LATE_S", 0.1)
    router, client = await linked(keys, chunk_tokens=1, delay_s=0.01, loses=lambda number: number == 2)
    with pytest.raises(RouterLost, match="chunk 2"):
        async for _ in client.generate(request(num_tokens=200)):
            pass
    assert router.num_sent < 100
    close(router, client)


async def test_a_slow_client_and_chunks_that_are_late_one_after_the_other_break_no_stream(keys, monkeypatch):
    """There is always one missing; each of them is waited for anew."""
    monkeypatch.setattr(chunk_streams, "_LATE_S", 0.9)
    receiver = ChunkReceiver(keys)
    chunks = [TokenChunk(request_id="r", index=index, token_ids=(index,)) for index in range(9)]

    async def served() -> AsyncGenerator[TokenChunk, None]:
        for index in (0, 2, 4, 1, 6, 3, 8, 5, 7):
            yield chunks[index]
            await asyncio.sleep(0.2)
        yield TokenChunk(request_id="r", index=9, token_ids=(), finish_reason="stop")

    heard = []
    async for chunk in receiver.chunks("r", served()):
        heard.append(chunk.index)
        if chunk.index == 2:
            await asyncio.sleep(1.0)
    assert heard == list(range(10))
    receiver.close()


async def test_chunks_of_two_attempts_are_not_mixed(keys):
    """Serve has repeated a call whose first router answers all the same, in other rounds."""
    receiver = ChunkReceiver(keys)
    first = [TokenChunk(request_id="r", index=index, token_ids=(index, 7), attempt="a") for index in range(2)]

    async def served() -> AsyncGenerator[TokenChunk, None]:
        receiver._hear(chunk_streams.encode_chunks(first))
        yield TokenChunk(request_id="r", index=2, token_ids=(5,), finish_reason="stop", attempt="b")

    heard = []

    async def read() -> None:
        async for chunk in receiver.chunks("r", served()):
            heard.append(chunk.token_ids)

    with pytest.raises(RouterLost, match="twice"):
        await read()
    assert heard == [(0, 7), (1, 7)]
    receiver.close()
