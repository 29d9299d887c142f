"""What sending rounds ahead brings on a device that computes a round in a given time, whatever it holds.

    python -m tests.bench.bench_rounds_ahead [--ms 4,7,10] [--sequences 1,8,32] [--drafters suffix,prompt_lookup]

The device is a process behind a real link: an engine that really plans its rounds, whose launches sleep. Router, CPU
drafters and the worker's loop are the product's. Its text repeats itself after a while, but for one token in four. Idle
is the share of the time in which the device computes nothing; modes take turns, and the median of their turns counts.
`bench_simulated_device` tells the same without the machine's own pace.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from actors.drafters.registry import create_drafters
from actors.engine.planned_round import PlannedRound
from actors.links.client import AsyncLink
from actors.links.keys import LinkKeys
from actors.links.server import LinkServer
from actors.messages import (
    GenerationRequest,
    SamplingParams,
    TokenChunk,
    VerifyAhead,
    VerifyBatch,
    VerifyResult,
    WorkerInfo,
)
from actors.workers.worker_loop import WorkerLoop
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from cluster.router.run_round import RoundHooks, run_rounds
from paceline_testing.rounds import toy_info
from paceline_testing.toy_target import ToyTarget
from tests.bench.bench_round_planning import engine_of, launched

VOCAB, LONGEST, BLOCK = 997, 4096, 16


class Surprising(ToyTarget):
    """Text that repeats itself but for one token in four, which nobody can foresee."""

    def next_token(self, tokens: Sequence[int]) -> int:
        place = len(tokens) * 0x9E3779B1 & 0xFFFFFFFF
        return place % VOCAB if place >> 30 == 0 else super().next_token(tokens)


class SleepingDevice:
    """An engine that plans as for an accelerator, and launches that take `seconds`. Only the text is thought up
    meanwhile; what the engine does between two launches keeps the device waiting."""

    overlaps = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._toy = Surprising(VOCAB, LONGEST, BLOCK, 1 << 20, order=1)
        self._engine = engine_of("triton_tree", 32 * -(-LONGEST // BLOCK), nodes=0)
        self._engine._runner.launch = self._launch  # type: ignore[method-assign]
        self._ends_at = 0.0
        self._shape = (0, 0)
        self.begin, self.prepare, self.follow = self._engine.begin, self._engine.prepare, self._engine.follow
        self.result, self.answer, self.clear = self._engine.result, self._engine.answer, self._engine.clear

    def is_computing(self, begun: Any) -> bool:
        return time.perf_counter() < self._ends_at

    def settle(self, begun: Any) -> None:
        if begun.computing is not None:
            begun.computing.launched.result[:] = torch.from_numpy(self._walked(begun.round).reshape(-1))
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))
        self._engine.settle(begun)

    def _launch(self, inputs: Any, shape: Any, launch: Any, **_: Any) -> Any:
        self._ends_at = time.perf_counter() + self._seconds
        if shape is None:
            return None
        self._shape = len(inputs.more[3]) - 1, 2 + shape.nodes
        return launched(torch.empty(self._shape[0] * self._shape[1], dtype=torch.int64))

    def _walked(self, round: PlannedRound) -> np.ndarray:
        """int64 [trees, 2 + nodes]: what the text says of the trees of a round."""
        walked = np.zeros(self._shape, np.int64)
        tokens, parents, offsets = round.trees
        for row, place in zip(walked, round.emitting.tolist(), strict=False):
            text = round.sequences[place].tokens.tolist()
            node, path = -1, []
            for index, own in enumerate(range(offsets[place], offsets[place + 1])):
                if parents[own] == node and tokens[own] == self._toy.next_token(text):
                    node = index
                    path.append(node)
                    text.append(int(tokens[own]))
            row[:2] = len(path), self._toy.next_token(text)
            row[2 : 2 + len(path)] = path
        return walked


class NoDraftWorkers:
    async def ask(self, round: Any) -> None:
        pass

    async def collect(self, round: Any) -> dict[str, Any]:
        return {}


def serve(seconds: float, router_key: bytes, addresses: Any) -> None:
    torch.set_num_threads(1)
    server = LinkServer(LinkKeys.generate(), [router_key])
    addresses.put(server.address)
    WorkerLoop(SleepingDevice(seconds), server, info()).run()


def info() -> WorkerInfo:
    return toy_info(VOCAB, LONGEST, BLOCK)


async def measure(
    address: Any, keys: LinkKeys, mode: str, seconds: float, count: int, drafters: tuple[str, ...], rounds: int
) -> dict[str, float]:
    link = AsyncLink(address, keys)
    core = RouterCore(
        info(), RouterConfig(send_ahead=mode, max_running=count), SpeculationConfig(drafters=drafters),
        create_drafters(drafters),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    tokens = computed = 0

    async def verify(message: VerifyBatch | VerifyAhead) -> Any:
        nonlocal computed
        answer = await link.call(message, timeout_s=30.0)
        computed += isinstance(answer, VerifyResult) and bool(answer.verdicts)
        return answer

    def deliver(events: list[Any]) -> None:
        nonlocal tokens
        tokens += sum(len(event.token_ids) for event in events if isinstance(event, TokenChunk))

    for index in range(count):
        prompt = rng.integers(0, VOCAB, 64).astype(np.int32)
        core.add(
            GenerationRequest(
                request_id=f"r{index}", prompt_token_ids=prompt, max_new_tokens=LONGEST - 64,
                sampling=SamplingParams(seed=index, temperature=0.0),
            ),
            time.monotonic(),
        )  # fmt: skip
    hooks = RoundHooks(deliver=deliver)
    while computed < rounds // 4:  # until drafts and times are known
        await run_rounds(core, NoDraftWorkers(), verify, hooks)
    began, tokens, computed = time.perf_counter(), 0, 0
    while computed < rounds and core.has_work:
        await run_rounds(core, NoDraftWorkers(), verify, hooks)
    wall = time.perf_counter() - began
    for index in range(count):
        core.cancel(f"r{index}")
    await run_rounds(core, NoDraftWorkers(), verify, hooks)
    link.close()
    return {"idle": 1 - computed * seconds / wall, "tokens/s": tokens / wall, "tokens a round": tokens / computed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ms", default="4,7,10")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--drafters", default="suffix,prompt_lookup")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    os.environ.setdefault("TRITON_INTERPRET", "1")  # nothing of it is launched
    keys, context = LinkKeys.generate(), multiprocessing.get_context("spawn")
    drafters = tuple(filter(None, given.drafters.split(",")))
    print("   ms  sequences  mode   idle   tokens/s  tokens a round")
    for seconds in [float(ms) / 1e3 for ms in given.ms.split(",")]:
        addresses = context.Queue()
        device = context.Process(target=serve, args=(seconds, keys.public, addresses), daemon=True)
        device.start()
        address = addresses.get(timeout=60)
        for count in map(int, given.sequences.split(",")):
            turns: dict[str, list[dict[str, float]]] = {"off": [], "auto": [], "on": []}
            for _ in range(given.turns):
                for mode, done in turns.items():
                    done.append(asyncio.run(measure(address, keys, mode, seconds, count, drafters, given.rounds)))
            for mode, done in turns.items():
                found = {name: statistics.median(one[name] for one in done) for name in done[0]}
                print(
                    f"{seconds * 1e3:5.0f}  {count:9}  {mode:4}  {found['idle']:5.1%}  {found['tokens/s']:9.0f}  "
                    f"{found['tokens a round']:14.2f}",
                    flush=True,
                )
        device.terminate()
        device.join()


if __name__ == "__main__":
    main()
