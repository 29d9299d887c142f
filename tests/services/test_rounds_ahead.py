"""Rounds that are sent ahead over a real link: the answers are those of serial rounds, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from actors.draft_tree import DraftTree, TopProbs
from actors.drafters.contract import CpuDrafter
from actors.drafters.registry import create_drafters
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.links.client import AsyncLink
from actors.links.keys import LinkKeys
from actors.links.server import LinkServer
from actors.messages import (
    AheadItem,
    GenerationRequest,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    TokenChunk,
    VerifyAhead,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
    WorkerInfo,
)
from actors.workers.worker_loop import WorkerLoop
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from cluster.router.run_round import RoundHooks, run_rounds
from paceline_testing.integrity import check_integrity
from paceline_testing.rounds import toy_info, toy_request
from paceline_testing.tiny_models import make_tiny_model
from paceline_testing.toy_target import ToyTarget

KEYS = LinkKeys.generate()
EOS = 3


class NoDraftWorkers:
    async def ask(self, round: Any) -> None:
        pass

    async def collect(self, round: Any) -> dict[str, Any]:
        return {}


class RightDrafter(CpuDrafter):
    """Chains of the toy target's own text, of which some are wrong from some token on."""

    name = "prompt_lookup"

    def __init__(self, toy: ToyTarget, right: float) -> None:
        self._toy, self._right, self._random = toy, right, random.Random(1)

    def propose(self, contexts: Any) -> list[DraftTree]:
        trees = []
        for context in contexts:
            count = min(4, context.max_nodes)
            tokens = self._toy.text_after(context.tokens[-2:].tolist(), count)
            for index in range(count):
                if self._random.random() > self._right:
                    tokens[index:] = [1] * (count - index)
                    break
            trees.append(DraftTree.chain(np.array(tokens, np.int32), np.full(count, 0.9, np.float32)))
        return trees


class ToyEngine:
    """A toy target behind a loop. `before` is called with every batch."""

    def __init__(self) -> None:
        # It computes nothing, so that all the time of a round is the router's.
        self.toy = ToyTarget(eos_token_id=EOS, seed=4, seconds=lambda rows: 1e-5)
        self.before: Callable[[VerifyBatch], None] = lambda batch: None

    def answer(self, batch: VerifyBatch) -> VerifyResult:
        self.before(batch)
        return self.toy.verify(batch)

    def clear(self) -> None:
        self.toy.lose_all()


@contextmanager
def serving(engine: Any, info: WorkerInfo):
    server = LinkServer(LinkKeys.generate(), [KEYS.public])
    loop = WorkerLoop(engine, server, info)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield server.address
    finally:
        loop.stop()
        thread.join()
        server.close()


class Run:
    """Requests through a core, with rounds over the link until they have ended."""

    def __init__(self, core: RouterCore) -> None:
        self.core = core
        self.sent_ahead = self.carried_out = 0
        self.texts: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    async def to_its_end(self, address: Any, between: Callable[[], None] = lambda: None) -> None:
        link = AsyncLink(address, KEYS)

        async def verify(message: VerifyBatch | VerifyAhead) -> Any:
            self.sent_ahead += isinstance(message, VerifyAhead)
            answer = await link.call(message, timeout_s=30.0)
            if isinstance(message, VerifyAhead):
                self.carried_out += not (isinstance(answer, VerifyResult) and answer.is_declined)
            return answer

        try:
            for _ in range(5000):
                if not self.core.has_work:
                    break
                between()
                await run_rounds(self.core, NoDraftWorkers(), verify, RoundHooks(deliver=self._deliver))
            assert not self.core.has_work
            await run_rounds(self.core, NoDraftWorkers(), verify, RoundHooks(deliver=self._deliver))
        finally:
            link.close()
        counters = self.core.counters
        assert (counters.ahead_sent, counters.ahead_used) == (self.sent_ahead, self.carried_out)
        assert counters.ahead_used + counters.ahead_declined <= counters.ahead_sent

    def _deliver(self, events: list[Any]) -> None:
        for event in events:
            assert isinstance(event, TokenChunk), event
            self.texts.setdefault(event.request_id, []).extend(event.token_ids)
            if event.finish_reason is not None:
                self.ended[event.request_id] = event.finish_reason


def toy_run(mode: str, right: float, requests: list[GenerationRequest]) -> tuple[Run, ToyEngine]:
    engine = ToyEngine()
    core = RouterCore(
        toy_info(97, 256, 4), RouterConfig(send_ahead=mode, max_running=6),
        SpeculationConfig(drafters=("prompt_lookup",)), {"prompt_lookup": RightDrafter(engine.toy, right)},
    )  # fmt: skip
    for request in requests:
        core.add(request, 0.0)
    return Run(core), engine


def requests(count: int, seed: int = 0) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    return [
        toy_request(
            f"r{seed}-{index}", rng.integers(4, 97, 1 + 5 * (index % 4)), 40 + 15 * (index % 3), stop_token_ids=(EOS,)
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
async def test_answers_are_the_targets_own_and_nothing_is_left(right):
    run, engine = toy_run("on", right, requests(24))
    with serving(engine, toy_info(97, 256, 4)) as address:
        await run.to_its_end(address)
    for request in requests(24):
        assert (run.texts.get(request.request_id, []), run.ended[request.request_id]) == engine.toy.complete(request)
    assert run.sent_ahead > 10
    assert run.carried_out > (10 if right else 0)
    assert engine.toy.num_sequences == 0
    assert run.core.counters.stale_sequences == run.core.counters.abandoned_rounds == 0


async def test_requests_that_come_and_are_cancelled_meanwhile():
    run, engine = toy_run("on", 0.9, requests(4))
    later, rng = requests(40, seed=1), random.Random(5)
    cancelled = set()

    def between() -> None:
        if later and rng.random() < 0.5:
            run.core.add(request := later.pop(), 0.0)
            if rng.random() < 0.3:
                cancelled.add(request.request_id)
        for request_id in list(cancelled):
            if rng.random() < 0.2:
                run.core.cancel(request_id)

    with serving(engine, toy_info(97, 256, 4)) as address:
        while later or run.core.has_work:
            between()
            await run.to_its_end(address, between)
    assert run.carried_out > 20
    assert engine.toy.num_sequences == 0
    for request in requests(4) + requests(40, seed=1):
        if request.request_id not in cancelled:
            tokens, reason = engine.toy.complete(request)
            assert run.ended[request.request_id] == reason
            assert run.texts.get(request.request_id, []) == tokens


async def test_a_target_that_fails_in_a_round_that_was_sent_ahead_costs_no_token():
    run, engine = toy_run("on", 0.9, requests(24))
    rng = random.Random(2)

    def fail(batch: VerifyBatch) -> None:
        if rng.random() < 0.05:
            raise RuntimeError("injected")

    engine.before = fail
    with serving(engine, toy_info(97, 256, 4)) as address:
        await run.to_its_end(address)
    for request in requests(24):
        assert (run.texts.get(request.request_id, []), run.ended[request.request_id]) == engine.toy.complete(request)
    assert run.core.counters.abandoned_rounds > 0
    assert run.carried_out > 10


async def test_a_round_sent_ahead_that_no_router_sends_is_declined():
    engine, text = ToyEngine(), np.array([5, 6, 7, 8], np.int32)
    item = VerifyItem(SequenceDelta(1, 0, text), 8, None, SequenceStart(SamplingParams(1, temperature=0.0), len(text)))
    falling = np.array([0.9, 0.8], np.float32)
    good = DraftTree.chain(text[:2], falling)
    wrong = [
        [AheadItem(1, DraftTree(text[:2], np.array([-1, 1 << 30], np.int32), falling), 4)],
        [AheadItem(1, DraftTree(text, np.array([-1], np.int32), falling), 4)],
        [AheadItem(1, DraftTree.chain(text[:2], falling[::-1]), 4)],
        [AheadItem(1, DraftTree.chain(text[:2], falling, TopProbs(text[:2], falling, 1)), 4)],
        [AheadItem(1, good, 4), AheadItem(1, good, 4)],
        [AheadItem(1, good, 1 << 63)],
    ]
    with serving(engine, toy_info(97, 256, 4)) as address:
        link = AsyncLink(address, KEYS)
        try:
            await link.call(VerifyBatch(1, [item]), timeout_s=30.0)
            for items in wrong:
                answer = await link.call(VerifyAhead(2, 1, items), timeout_s=30.0)
                assert answer.is_declined, items
            answer = await link.call(VerifyAhead(2, 1, [AheadItem(1, good, 4)]), timeout_s=30.0)
            assert not answer.is_declined
            assert len(answer.verdicts) == 1
        finally:
            link.close()


class SlowDevice(TargetEngine):
    """Says that it computes until it is asked for the outcome, as a device does. `fails`: whether a step does."""

    overlaps = True
    num_followed = 0
    fails: Callable[[], bool] = staticmethod(lambda: False)

    def settle(self, begun: Any) -> None:
        self._may_fail()
        super().settle(begun)

    def result(self, begun: Any) -> VerifyResult:
        self._may_fail()
        return super().result(begun)

    def _may_fail(self) -> None:
        if self.fails():
            raise RuntimeError("injected")

    def is_computing(self, begun: Any) -> bool:
        return True

    def follow(self, prepared: Any, settled: Any) -> Any:
        following = super().follow(prepared, settled)
        self.num_followed += following is not None
        return following

    def _launch(self, *arguments: Any) -> None:
        self._may_fail()
        super()._launch(*arguments)


def engine_run(mode: str, engine: TargetEngine, sampling: SamplingParams) -> tuple[Run, WorkerInfo]:
    info = WorkerInfo("target", 1, engine.vocab_size, 512, 4, engine.options.num_blocks)
    names = ("prompt_lookup", "suffix")
    core = RouterCore(info, RouterConfig(send_ahead=mode), SpeculationConfig(drafters=names), create_drafters(names))
    for index in range(4):
        prompt = np.tile(np.arange(index, index + 6, dtype=np.int32), 4)
        core.add(
            GenerationRequest(request_id=f"r{index}", prompt_token_ids=prompt, max_new_tokens=60, sampling=sampling),
            0.0,
        )
    return Run(core), info


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1, temperature=0.0),
        SamplingParams(2, temperature=0.9, top_p=0.9),
        SamplingParams(3, temperature=0.7, repetition_penalty=1.3),
    ],
    ids=["greedy", "sampled", "penalties"],
)
async def test_an_engines_tokens_are_those_of_serial_rounds(sampling):
    texts = {}
    model = make_tiny_model("llama", vocab_size=61)
    for mode, kind in (("off", TargetEngine), ("on", TargetEngine), ("off", SlowDevice), ("on", SlowDevice)):
        engine = kind(model, EngineOptions(256, 4))
        run, info = engine_run(mode, engine, sampling)
        with serving(engine, info) as address:
            await run.to_its_end(address)
        texts[mode, kind] = run.texts
        check_integrity(engine)
        assert engine.num_sequences == 0
        assert (run.carried_out > 0) == (mode == "on")
        if isinstance(engine, SlowDevice):
            assert engine.num_followed == run.carried_out
    serial = texts["off", TargetEngine]
    assert all(found == serial for found in texts.values())
    assert all(len(text) == 60 for text in serial.values())


def spaced_failures(rng: random.Random) -> Iterator[bool]:
    """Which steps fail: none soon after another, as a request whose rounds keep failing is given up."""
    while True:
        yield from [False] * rng.randint(10, 20)
        yield True


async def test_a_device_that_fails_in_rounds_that_follow_at_once_costs_no_token():
    sampling = SamplingParams(2, temperature=0.9)
    model, texts = make_tiny_model("llama", vocab_size=61), []
    for is_failing in (False, True):
        engine = SlowDevice(model, EngineOptions(256, 4))
        if is_failing:
            engine.fails = spaced_failures(random.Random(3)).__next__
        run, info = engine_run("on", engine, sampling)
        with serving(engine, info) as address:
            await run.to_its_end(address)
        texts.append(run.texts)
        check_integrity(engine)
        assert (run.core.counters.abandoned_rounds > 0) == is_failing
    assert texts[0] == texts[1]


async def test_another_routers_rounds_come_between():
    """Messages that arrive while a round is computed are handled after it, in order."""
    engine = SlowDevice(make_tiny_model("llama", vocab_size=61), EngineOptions(512, 4))
    runs = [engine_run("on", engine, SamplingParams(seed, temperature=0.9)) for seed in (1, 2)]
    alone = []
    for seed in (1, 2):
        run, info = engine_run("off", TargetEngine(engine.model, EngineOptions(256, 4)), SamplingParams(seed, 0.9))
        with serving(TargetEngine(engine.model, EngineOptions(256, 4)), info) as address:
            await run.to_its_end(address)
        alone.append(run.texts)
    with serving(engine, runs[0][1]) as address:
        await asyncio.gather(*[run.to_its_end(address) for run, _ in runs])
    assert [run.texts for run, _ in runs] == alone
    assert engine.num_followed > 0
    assert engine.num_sequences == 0
    check_integrity(engine)
