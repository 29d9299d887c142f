"""Masks that follow their batch over real links, to an engine with a tiny model: tokens are those of an engine in this
process, whoever else is served, and a router that dies before its masks are sent costs the others a few seconds."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.links.client import AsyncLink
from actors.links.codec import pack
from actors.links.keys import LinkAddress, LinkKeys
from actors.links.server import LinkServer
from actors.messages import (
    Failure,
    MasksSource,
    RoundMasks,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    TokenMasks,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
    WorkerInfo,
)
from actors.workers.inbox import MASKS_TIMEOUT_S
from actors.workers.worker_loop import WorkerLoop
from paceline_testing.drafting import tree_to_verify
from paceline_testing.tiny_models import make_tiny_model

VOCAB = 61
ROUTER_KEYS = LinkKeys.generate()
INFO = WorkerInfo("target", 7, VOCAB, 2048, 4, 64)
PATIENCE_S = 30.0
NEW_TOKENS = 24

Answer = VerifyResult | Failure
Ask = Callable[[VerifyBatch, MasksSource], Awaitable[Answer]]


class SlowDevice(TargetEngine):
    """Says that it computes until it is asked for the outcome, as a device does."""

    overlaps = True

    def is_computing(self, begun: Any) -> bool:
        return True


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_tiny_model("llama", layers=1, vocab_size=VOCAB, hidden_size=16, heads=2, kv_heads=1)


def engine_of(model: torch.nn.Module, kind: type[TargetEngine] = TargetEngine) -> TargetEngine:
    return kind(model, EngineOptions(256, 4, attention="padded"))


@contextmanager
def serving(engine: TargetEngine) -> Iterator[tuple[WorkerLoop, LinkServer]]:
    with LinkServer(LinkKeys.generate(), [ROUTER_KEYS.public]) as server:
        loop = WorkerLoop(engine, server, INFO)
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            yield loop, server
        finally:
            loop.stop()
            thread.join()


def is_allowed(before: int, token: int) -> bool:
    """The grammar: about a third of the tokens may follow one."""
    return (5 * before + 11 * token) % 7 < 2


def masks_behind(tokens: list[int]) -> TokenMasks:
    """A row behind each of these."""
    words = np.zeros((len(tokens), -(-VOCAB // 32)), np.uint32)
    for row, before in enumerate(tokens):
        for token in range(VOCAB):
            words[row, token // 32] |= np.uint32(is_allowed(before, token) << token % 32)
    return TokenMasks(words.view(np.int32).reshape(-1), np.arange(len(tokens), dtype=np.int32))


async def text_of(seq_id: int, ask: Ask) -> list[int]:
    """A text of one sequence, with a draft in each round. It starts over when the target has lost it."""
    text, sent = [seq_id, 3, 2 * seq_id], 0
    for round_id in range(1, 10 * NEW_TOKENS):
        # Of allowed tokens, so that some are accepted.
        draft = [next(token for token in range(round_id % 50, VOCAB) if is_allowed(text[-1], token))]
        begin = None if sent else SequenceStart(SamplingParams(seq_id, temperature=1.5), 3)
        delta = SequenceDelta(seq_id, sent, np.array(text[sent:], np.int32))
        batch = VerifyBatch(round_id, [VerifyItem(delta, 99, tree_to_verify(draft, [-1]), begin)], masks_follow=True)
        rows = [text[-1], *draft]

        def masks(round_id: int = round_id, rows: list[int] = rows) -> RoundMasks:
            return RoundMasks(round_id, [masks_behind(rows)])

        answer = await ask(batch, masks)
        sent = len(text)
        if isinstance(answer, Failure) or answer.stale_seq_ids:
            sent = 0
            continue
        (verdict,) = answer.verdicts
        text += [*np.array(draft)[verdict.path].tolist(), verdict.next_token]
        if len(text) >= NEW_TOKENS:
            assert all(is_allowed(*pair) for pair in pairwise(text[2:]))
            return text[:NEW_TOKENS]
    raise AssertionError("the text does not come to an end")


async def text_over_link(
    address: LinkAddress, seq_id: int, late_s: float = 0.0, goes_on: asyncio.Event | None = None
) -> list[int]:
    """late_s: what masks take. goes_on: waited for in the middle of the text."""
    with closing(AsyncLink(address, ROUTER_KEYS)) as link:

        async def ask(batch: VerifyBatch, masks: MasksSource) -> Answer:
            def late() -> RoundMasks:
                time.sleep(late_s)
                return masks()

            if goes_on is not None and batch.round_id == 6:
                await goes_on.wait()
            return await link.call(batch, PATIENCE_S, late)  # type: ignore[return-value]

        return await text_of(seq_id, ask)


async def texts_alone(model: torch.nn.Module, *seq_ids: int) -> list[list[int]]:
    engine = engine_of(model)

    async def ask(batch: VerifyBatch, masks: MasksSource) -> Answer:
        return engine.verify(batch, masks)

    return [await text_of(seq_id, ask) for seq_id in seq_ids]


async def test_a_batch_has_arrived_before_its_masks_are_computed() -> None:
    with LinkServer(LinkKeys.generate(), [ROUTER_KEYS.public]) as server:
        arrived: list[object] = []

        def masks() -> RoundMasks:
            arrived.append(server.recv(PATIENCE_S))
            return RoundMasks(4, [])

        batch = VerifyBatch(4, [], masks_follow=True)
        with closing(AsyncLink(server.address, ROUTER_KEYS)) as link:
            call = asyncio.create_task(link.call(batch, PATIENCE_S, masks))
            found = await asyncio.to_thread(lambda: server.recv(PATIENCE_S) if until(lambda: bool(arrived)) else None)
            assert found is not None
            peer, message = found
            assert arrived == [(peer, batch)]
            assert message == RoundMasks(4, [])
            server.send(peer, VerifyResult(4, []))
            assert await call == VerifyResult(4, [])
            assert link.in_flight == 0


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)
    return True


@pytest.mark.parametrize("kind", [TargetEngine, SlowDevice])
def test_rounds_of_two_routers_share_a_target_while_each_waits_for_its_masks(model, kind) -> None:
    with serving(engine_of(model, kind)) as (loop, server):
        kept, keep = [], loop._inbox._keep

        def count(*given: Any) -> None:
            kept.append(given)
            keep(*given)

        loop._inbox._keep = count  # type: ignore[method-assign]
        texts: dict[int, list[int]] = {}

        def route(seq_id: int) -> None:
            texts[seq_id] = asyncio.run(text_over_link(server.address, seq_id, late_s=0.004 * seq_id))

        threads = [threading.Thread(target=route, args=(seq_id,)) for seq_id in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert kept, "no batch of one has arrived while the other's masks were waited for"
        assert [texts[1], texts[2]] == asyncio.run(texts_alone(model, 1, 2))


async def test_masks_that_come_twice_or_without_a_batch_change_nothing(model) -> None:
    with serving(engine_of(model)) as (_, server), closing(AsyncLink(server.address, ROUTER_KEYS)) as link:

        async def ask(batch: VerifyBatch, masks: MasksSource) -> Answer:
            def twice() -> RoundMasks:
                found = masks()
                link._send(pack(RoundMasks(batch.round_id - 1, found.masks)))
                link._send(pack(found))
                return found

            return await link.call(batch, PATIENCE_S, twice)  # type: ignore[return-value]

        assert [await text_of(5, ask)] == await texts_alone(model, 5)


@pytest.mark.parametrize("masks", [[], [None, None], [TokenMasks(np.zeros(3, np.int32), np.zeros(2, np.int32))]])
async def test_masks_that_do_not_fit_fail_the_round_alone(model, masks) -> None:
    with serving(engine_of(model)) as (_, server), closing(AsyncLink(server.address, ROUTER_KEYS)) as link:
        asked: list[int] = []

        async def ask(batch: VerifyBatch, good: MasksSource) -> Answer:
            asked.append(batch.round_id)
            wrong = len(asked) == 3
            answer = await link.call(batch, PATIENCE_S, lambda: RoundMasks(batch.round_id, masks) if wrong else good())
            assert isinstance(answer, Failure) == wrong
            return answer  # type: ignore[return-value]

        assert [await text_of(6, ask)] == await texts_alone(model, 6)


def die_before_masks(address: LinkAddress, keys: LinkKeys) -> None:
    def die() -> RoundMasks:
        time.sleep(0.1)  # the batch leaves
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    async def ask() -> None:
        delta, begin = SequenceDelta(77, 0, np.arange(4, dtype=np.int32)), SequenceStart(SamplingParams(1), 4)
        batch = VerifyBatch(1, [VerifyItem(delta, 9, None, begin)], masks_follow=True)
        await AsyncLink(address, keys).call(batch, PATIENCE_S, die)

    asyncio.run(ask())


@pytest.mark.parametrize("kind", [pytest.param(TargetEngine, marks=pytest.mark.slow), SlowDevice])
async def test_a_router_that_dies_before_its_masks_costs_the_others_a_few_seconds(model, kind) -> None:
    with serving(engine_of(model, kind)) as (loop, server):
        died = asyncio.Event()
        other = asyncio.create_task(text_over_link(server.address, 3, goes_on=died))
        processes = multiprocessing.get_context("spawn")
        dying = processes.Process(target=die_before_masks, args=(server.address, ROUTER_KEYS))
        dying.start()
        await asyncio.to_thread(until, lambda: not dying.is_alive())
        assert dying.exitcode == -signal.SIGKILL
        died.set()
        began = time.monotonic()
        again = await text_over_link(server.address, 4)
        assert 0.5 * MASKS_TIMEOUT_S < time.monotonic() - began < MASKS_TIMEOUT_S + 5.0
        assert [await other, again] == await texts_alone(model, 3, 4)
        assert loop.busy_s == 0.0
