"""What sending rounds ahead brings on a device that computes a round in a given time, whatever it holds.

    python tests/bench/bench_rounds_ahead.py [--ms 4,7,10] [--sequences 1,8,32] [--drafters suffix,prompt_lookup]

The device is a process that sleeps, behind a real link; router, CPU drafters and the worker's loop are the product's.
Its text repeats itself after a while, but for one token in four. Idle is the share of the time in which
the device computes nothing; modes take turns, and of several turns the fastest one counts.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from actors.drafters.registry import create_drafters
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

VOCAB, LONGEST, BLOCK = 997, 4096, 16


class Surprising(ToyTarget):
    """Text that repeats itself but for one token in four, which nobody can foresee."""

    def next_token(self, tokens: Sequence[int]) -> int:
        place = len(tokens) * 0x9E3779B1 & 0xFFFFFFFF
        return place % VOCAB if place >> 30 == 0 else super().next_token(tokens)


class SleepingDevice:
    """Computes every round in `seconds`, whatever its own bookkeeping takes of them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._toy = Surprising(VOCAB, LONGEST, BLOCK, 1 << 20, order=1, seconds=lambda rows: seconds)

    def answer(self, batch: VerifyBatch) -> VerifyResult:
        until = time.perf_counter() + self._seconds
        result = self._toy.verify(batch)
        if batch.items:
            time.sleep(max(0.0, until - time.perf_counter()))
        return result

    def clear(self) -> None:
        self._toy.lose_all()


class NoDraftWorkers:
    async def ask(self, round: Any) -> None:
        pass

    async def collect(self, round: Any) -> dict[str, Any]:
        return {}


def serve(seconds: float, router_key: bytes, addresses: Any) -> None:
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
    keys, context = LinkKeys.generate(), multiprocessing.get_context("spawn")
    drafters = tuple(filter(None, given.drafters.split(",")))
    print("   ms  sequences  mode   idle   tokens/s  tokens a round")
    for seconds in [float(ms) / 1e3 for ms in given.ms.split(",")]:
        addresses = context.Queue()
        device = context.Process(target=serve, args=(seconds, keys.public, addresses), daemon=True)
        device.start()
        address = addresses.get(timeout=60)
        for count in map(int, given.sequences.split(",")):
            best: dict[str, dict[str, float]] = {}
            for _ in range(given.turns):
                for mode in ("off", "auto", "on"):
                    found = asyncio.run(measure(address, keys, mode, seconds, count, drafters, given.rounds))
                    if mode not in best or found["tokens/s"] > best[mode]["tokens/s"]:
                        best[mode] = found
            for mode, found in best.items():
                print(
                    f"{seconds * 1e3:5.0f}  {count:9}  {mode:4}  {found['idle']:5.1%}  {found['tokens/s']:9.0f}  "
                    f"{found['tokens a round']:14.2f}",
                    flush=True,
                )
        device.terminate()
        device.join()


if __name__ == "__main__":
    main()
