"""Rounds on a simulated device: how long it waits for the router, and what rounds and drafts made ahead bring.

    python tests/bench/bench_simulated_device.py [--ms 4,7,10] [--sequences 1,8,32] [--rounds 300]

Router core, CPU drafters, links, the workers' loops and the draft engine are the product's. Time is told: a round
takes a base time, more with its rows and the tokens of its sequences' contexts, a message takes a hop, and each stage
of router and worker the processor time that was measured for it. So a run gives the same figures on any machine,
busy or not.

Idle is the share of the time in which the device computes nothing; `router` is the part of it that is not the
engine's own work between two rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from actors.draft_model.draft_engine import DraftEngine
from actors.drafters.registry import create_drafters
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.links.client import AsyncLink
from actors.links.keys import LinkKeys
from actors.links.server import LinkServer
from actors.messages import (
    DraftBatch,
    DraftResult,
    GenerationRequest,
    SamplingParams,
    TokenChunk,
    VerifyAhead,
    VerifyBatch,
    VerifyResult,
    WorkerInfo,
)
from actors.workers.overlapped_rounds import LISTEN_SHARE
from actors.workers.worker_loop import Engine, WorkerLoop
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from cluster.router.counters import RouterCounters
from cluster.router.linked_drafts import LinkedDrafts
from cluster.router.round import Round
from cluster.router.run_round import DraftResults, RoundHooks, RoundStage, run_rounds
from cluster.router.worker_drafting import DraftShape
from paceline_testing.rounds import toy_info
from paceline_testing.tiny_models import make_tiny_model
from paceline_testing.toy_target import ToyTarget

VOCAB, LONGEST, BLOCK = 997, 16_384, 16
PROMPT = 64
# Seconds. Keys and values of an 8B model with 8 heads of 128 in bf16 (131 kB a token), read at 4.3 TB/s with what else
# an attention kernel costs, and the matrix products of a row.
A_CONTEXT_TOKEN, A_ROW = 27e-9, 4e-6
HOP = 0.1e-3
DRAFT_FORWARD = 0.7e-3  # of a 1B draft model
# Processor time: of a round and of each of its sequences. The router's stages as measured with two CPU drafters, the
# worker's as `bench_round_planning` measures them with trees of seven nodes: a whole round; and of a round that was
# sent ahead in time (`overlapped_rounds`) what is between the outcome and the next launch, and the result after it.
HOST_TIMES: dict[str, tuple[float, float]] = {
    "plan": (30e-6, 2.4e-6),
    "draft": (40e-6, 26e-6),
    "assemble": (105e-6, 11.5e-6),
    "commit": (240e-6, 18e-6),
    "ahead": (150e-6, 42e-6),
    "worker": (90e-6, 6e-6),
    "between": (77e-6, 3e-6),
    "result": (10e-6, 0.6e-6),
}


def host_time(stage: str, sequences: int) -> float:
    fixed, each = HOST_TIMES[stage]
    return fixed + each * sequences


class Text(ToyTarget):
    """It repeats itself after a while, but for one token in so many, which nobody can foresee; 0: for none."""

    def __init__(self, surprise: int) -> None:
        super().__init__(VOCAB, LONGEST, BLOCK, 1 << 20, order=1)
        self._surprise = surprise

    def next_token(self, tokens: Sequence[int]) -> int:
        place = len(tokens) * 0x9E3779B1 & 0xFFFFFFFF
        is_surprising = self._surprise and place * self._surprise >> 32 == 0
        return place % VOCAB if is_surprising else super().next_token(tokens)


class Kind(NamedTuple):
    """Text, and who drafts it."""

    surprise: int
    drafters: tuple[str, ...]


_CPU_DRAFTERS = ("suffix", "prompt_lookup")
KINDS = {
    "no drafts": Kind(4, ()),
    "foreseen": Kind(0, _CPU_DRAFTERS),
    "1 in 16 not": Kind(16, _CPU_DRAFTERS),
    "1 in 4 not": Kind(4, _CPU_DRAFTERS),
}


class SimulatedTarget:
    """Answers of an engine, with the time that the device would have taken for them."""

    def __init__(self, engine: Any, base_s: float, context: int) -> None:
        """context: tokens that each sequence is taken to have before its own."""
        self._engine, self._base_s, self._context = engine, base_s, context

    def answer(self, batch: VerifyBatch) -> VerifyResult:
        result: VerifyResult = self._engine.verify(batch)
        tokens = sum(verdict.num_computed + self._context for verdict in result.verdicts)
        seconds = self._base_s + A_ROW * result.rows + A_CONTEXT_TOKEN * tokens if result.verdicts else 0.0
        return msgspec.structs.replace(result, elapsed_s=seconds)

    def clear(self) -> None:
        raise AssertionError("a round has failed")


class SimulatedDrafter:
    """A draft engine that takes DRAFT_FORWARD for each forward, and drafts ahead while nobody has asked."""

    def __init__(self, engine: DraftEngine, simulation: Simulation) -> None:
        self._engine, self._simulation = engine, simulation
        self._free_at = 0.0
        self._forwards = 0
        self.done_at: dict[int, float] = {}  # by round
        self.hoped = self.ready = 0
        run = engine._runner.run

        def counted(*arguments: Any) -> Any:
            self._forwards += 1
            return run(*arguments)

        engine._runner.run = counted  # type: ignore[method-assign]

    def answer(self, batch: DraftBatch) -> DraftResult:
        arrived = self._simulation.draft_sent_at[batch.round_id] + HOP
        while self._free_at < arrived and self._engine.work_ahead():
            self._free_at += DRAFT_FORWARD  # a request that arrives meanwhile waits for it
        self._forwards = 0
        result = self._engine.draft(batch)
        seconds = self._forwards * DRAFT_FORWARD
        self._free_at = max(arrived, self._free_at) + seconds
        self.done_at[batch.round_id] = self._free_at
        self.hoped += result.num_ahead
        self.ready += result.num_ready
        return msgspec.structs.replace(result, elapsed_s=seconds)

    def clear(self) -> None:
        raise AssertionError("a draft has failed")


class SimulatedDrafts:
    """Draft workers over real links; the router's clock goes on to the last answer that it waits for."""

    def __init__(self, simulation: Simulation, links: dict[str, AsyncLink]) -> None:
        self._simulation = simulation
        self._links = LinkedDrafts(60.0, RouterCounters().draft_lateness)
        self._links.links = links

    async def ask(self, round: Round) -> None:
        self._simulation.leave("plan")
        self._simulation.draft_sent_at[round.round_id] = self._simulation.now
        self._simulation.stage = "draft"
        await self._links.ask(round)

    async def collect(self, round: Round) -> DraftResults:
        results = await self._links.collect(round)
        drafter = self._simulation.drafter
        if drafter is not None and any(result is not None for result in results.values()):
            self._simulation.now = max(self._simulation.now, drafter.done_at[round.round_id] + HOP)
        return results


class Figures(NamedTuple):
    idle: float
    router_idle: float
    tokens_per_s: float
    tokens_a_round: float
    sent: int  # rounds ahead
    used: int
    declined: int
    ready: float  # share of drafts made ahead that were ready


@dataclass
class _Message:
    arrives_at: float
    is_ahead: bool
    answer: VerifyResult | None = None
    ends_at: float = 0.0
    listens_until: float = 0.0  # a round that follows it is prepared if it arrives before

    def overlaps(self, before: _Message) -> bool:
        """Whether the round is prepared while the one before is computed."""
        return self.is_ahead and self.arrives_at < before.listens_until


@dataclass
class Simulation:
    """The clock of a router, and a device that computes what it is sent in order."""

    now: float = 0.0
    stage: str = "end"
    sequences: int = 1
    free_at: float = 0.0
    busy_s: float = 0.0
    planning_s: float = 0.0  # of the engine, between two rounds
    tokens: int = 0
    rounds: int = 0
    drafter: SimulatedDrafter | None = None
    draft_sent_at: dict[int, float] = field(default_factory=dict)
    _asked: deque[_Message] = field(default_factory=deque)
    _untold: deque[_Message] = field(default_factory=deque)  # rounds whose result the router has not got
    _last: _Message = field(default_factory=lambda: _Message(0.0, False))
    _last_s: float = 0.0  # of its computation

    def begin(self, stage: RoundStage) -> None:
        if stage == "plan":
            self._asked.clear()  # rounds that were not begun
            self._untold.clear()
        if stage in ("collect", "assemble", "end"):
            self.leave(self.stage)
        if stage == "commit":
            self.now = max(self.now, self._told_at(self._untold.popleft()))
        self.stage = stage

    def leave(self, stage: str) -> None:
        """The router has been through a stage."""
        if stage in HOST_TIMES:
            self.now += host_time(stage, self.sequences)
        self.stage = "left"

    def deliver(self, events: list[Any]) -> None:
        self.tokens += sum(len(event.token_ids) for event in events if isinstance(event, TokenChunk))

    async def verify(self, link: AsyncLink, message: VerifyBatch | VerifyAhead) -> Any:
        self.leave("ahead" if isinstance(message, VerifyAhead) else self.stage)
        sent = _Message(self.now + HOP, isinstance(message, VerifyAhead))
        self._asked.append(sent)
        self._untold.append(sent)
        sent.answer = await link.call(message, timeout_s=60.0)
        assert isinstance(sent.answer, VerifyResult), sent.answer
        # Tasks may wake up in any order; the device computes in the order of the messages.
        while self._asked and self._asked[0].answer is not None:
            self._compute(self._asked.popleft())
        return sent.answer

    def _compute(self, sent: _Message) -> None:
        assert sent.answer is not None
        sent.ends_at = max(sent.arrives_at, self.free_at)
        if not sent.answer.verdicts:
            return
        planning = host_time("between" if sent.overlaps(self._last) else "worker", len(sent.answer.verdicts))
        begins_at, seconds = sent.ends_at + planning, sent.answer.elapsed_s
        sent.ends_at = self.free_at = begins_at + seconds
        sent.listens_until = min(sent.ends_at, begins_at + LISTEN_SHARE * self._last_s)
        self._last, self._last_s = sent, seconds
        self.busy_s += seconds
        self.planning_s += planning
        self.rounds += 1

    def _told_at(self, sent: _Message) -> float:
        """When the router has the result of a round."""
        is_followed = bool(self._untold) and self._untold[0].overlaps(sent)
        launches = ("between", "result") if is_followed else ()
        return sent.ends_at + sum(host_time(stage, self.sequences) for stage in launches) + HOP


@contextmanager
def serving(engine: Engine, info: WorkerInfo, keys: LinkKeys) -> Iterator[Any]:
    """A worker's loop in a thread; its address."""
    server = LinkServer(LinkKeys.generate(), [keys.public])
    loop = WorkerLoop(engine, server, info)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield server.address
    finally:
        loop.stop()
        thread.join()
        server.close()


async def _play(
    simulation: Simulation, core: RouterCore, drafts: Any, link: AsyncLink, sequences: int, rounds: int
) -> Figures:
    simulation.sequences = sequences
    hooks = RoundHooks(now=lambda: simulation.now, deliver=simulation.deliver, begin=simulation.begin)

    async def until(last: int) -> None:
        while simulation.rounds < last:
            assert core.has_work, "the requests have ended too early"
            await run_rounds(core, drafts, lambda message: simulation.verify(link, message), hooks)

    await until(rounds // 3)  # until drafts and times are known
    before = copy.copy(simulation)
    counted = core.counters.ahead_sent, core.counters.ahead_used, core.counters.ahead_declined
    await until(simulation.rounds + rounds)
    wall, done = simulation.free_at - before.free_at, simulation.rounds - before.rounds
    idle = 1 - (simulation.busy_s - before.busy_s) / wall
    sent, used, declined = (
        now - then
        for now, then in zip(
            (core.counters.ahead_sent, core.counters.ahead_used, core.counters.ahead_declined), counted, strict=True
        )
    )
    tokens, drafter = simulation.tokens - before.tokens, simulation.drafter
    return Figures(
        idle=idle,
        router_idle=idle - (simulation.planning_s - before.planning_s) / wall,
        tokens_per_s=tokens / wall,
        tokens_a_round=tokens / done,
        sent=sent,
        used=used,
        declined=declined,
        ready=drafter.ready / drafter.hoped if drafter is not None and drafter.hoped else 0.0,
    )


class NoDraftWorkers:
    async def ask(self, round: Any) -> None:
        pass

    async def collect(self, round: Any) -> dict[str, Any]:
        return {}


def _add_requests(core: RouterCore, prompts: list[np.ndarray], most_tokens: int) -> None:
    for index, prompt in enumerate(prompts):
        core.add(
            GenerationRequest(
                request_id=f"r{index}", prompt_token_ids=prompt, max_new_tokens=most_tokens,
                sampling=SamplingParams(seed=index, temperature=0.0),
            ),
            0.0,
        )  # fmt: skip


def simulate(mode: str, kind: Kind, base_s: float, sequences: int, rounds: int = 150, context: int = 1024) -> Figures:
    """CPU drafters alone. mode: `router.send_ahead`. context: tokens before those of the sequences."""
    drafters = kind.drafters
    toy = Text(kind.surprise)
    info, keys = toy_info(VOCAB, LONGEST, BLOCK), LinkKeys.generate()
    core = RouterCore(
        info, RouterConfig(send_ahead=mode, max_running=sequences), SpeculationConfig(drafters=drafters or ("none",)),
        create_drafters(drafters),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    _add_requests(core, [rng.integers(0, VOCAB, PROMPT).astype(np.int32) for _ in range(sequences)], LONGEST - PROMPT)

    async def run(address: Any) -> Figures:
        link = AsyncLink(address, keys)
        try:
            return await _play(Simulation(), core, NoDraftWorkers(), link, sequences, rounds)
        finally:
            link.close()

    with serving(SimulatedTarget(toy, base_s, context), info, keys) as address:
        return asyncio.run(run(address))


def simulate_draft_worker(ahead: int, base_s: float, sequences: int = 4, rounds: int = 60) -> Figures:
    """One draft worker whose model is the target's with noise on its weights. ahead: outcomes that it drafts for."""
    target, draft = (make_tiny_model("llama", vocab_size=61, max_positions=2048) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weights in draft.parameters():
            weights.add_(torch.randn(weights.shape, generator=generator) * weights.std() * 0.05)
    options, keys = EngineOptions(sequences * 160, BLOCK), LinkKeys.generate()
    engine, drafting = TargetEngine(target, options), DraftEngine(draft, options, ahead=ahead)
    info = WorkerInfo("target", 1, engine.vocab_size, 2048, BLOCK, options.num_blocks)
    draft_info = WorkerInfo("draft", 1, 0, 2048, BLOCK, options.num_blocks)
    core = RouterCore(
        info, RouterConfig(send_ahead="off", max_running=sequences), SpeculationConfig(drafters=("draft_model",)), {},
        draft_shapes={"draft": DraftShape(4)},
    )  # fmt: skip
    core.set_draft_workers(["drafter"])
    rng = np.random.default_rng(0)
    _add_requests(core, [rng.integers(0, 61, PROMPT).astype(np.int32) for _ in range(sequences)], 1900)
    simulation = Simulation()
    simulation.drafter = SimulatedDrafter(drafting, simulation)

    async def run(address: Any, draft_address: Any) -> Figures:
        link, draft_link = AsyncLink(address, keys), AsyncLink(draft_address, keys)
        drafts = SimulatedDrafts(simulation, {"drafter": draft_link})
        try:
            return await _play(simulation, core, drafts, link, sequences, rounds)
        finally:
            link.close()
            draft_link.close()

    with (
        serving(SimulatedTarget(engine, base_s, 0), info, keys) as address,
        serving(simulation.drafter, draft_info, keys) as draft_address,
    ):
        return asyncio.run(run(address, draft_address))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ms", default="4,7,10")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=300)
    given = parser.parse_args()
    began = time.perf_counter()
    torch.set_num_threads(1)
    bases = [float(ms) / 1e3 for ms in given.ms.split(",")]
    print("text          ms  sequences  ahead   idle  router  tokens/s  tokens a round  sent  used  declined")
    for name, kind in KINDS.items():
        for base_s in bases:
            for sequences in map(int, given.sequences.split(",")):
                for mode in ("off", "auto", "on"):
                    found = simulate(mode, kind, base_s, sequences, given.rounds, given.context)
                    print(
                        f"{name:11} {base_s * 1e3:4.0f}  {sequences:9}  {mode:5}  {found.idle:5.1%}  "
                        f"{found.router_idle:6.1%}  {found.tokens_per_s:8.0f}  {found.tokens_a_round:14.2f}  "
                        f"{found.sent:4}  {found.used:4}  {found.declined:8}",
                        flush=True,
                    )
    print("\n   ms  drafted ahead   idle  tokens/s  tokens a round  ready")
    for base_s in bases:
        for ahead in (0, 2, 4):
            found = simulate_draft_worker(ahead, base_s)
            print(
                f"{base_s * 1e3:5.0f}  {ahead:13}  {found.idle:5.1%}  {found.tokens_per_s:8.0f}  "
                f"{found.tokens_a_round:14.2f}  {found.ready:5.0%}",
                flush=True,
            )
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
