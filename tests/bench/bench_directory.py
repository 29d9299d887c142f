"""The directory as an actor of a real Ray under the calls of many routers and their target groups.

    python -m tests.bench.bench_directory [--routers 300] [--seconds 10] [--processes 6]

Two phases: routers follow it as they do in production, and targets beat once a second, while a draft worker changes
every four seconds; then as many heartbeats as callers and directory can do. Callers share the machine's processors.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from dataclasses import dataclass, field

import numpy as np
import psutil
import ray
from ray.actor import ActorProxy

from actors.links.keys import LinkAddress, LinkKeys
from actors.workers.demand import DraftDemand, TargetDemand
from actors.workers.directory import Asked, Role, WorkerEntry, find_directory, get_or_create_directory
from actors.workers.ray_environment import prepare_own_ray
from cluster.cli.table import plain_table
from cluster.router.directory_view import DirectoryView

_NAME = "bench"
_ASK_PERIOD_S = 0.25  # as in `cluster.router.deployment`
_BEAT_S = 1.0
_CHANGE_S = 4.0


def entry_of(role: Role, name: str, key: bytes, model_number: int = 0) -> WorkerEntry:
    return WorkerEntry(role, name, LinkAddress("tcp://10.0.0.1:20000", key), 1, model="m", model_number=model_number)


@dataclass
class Books:
    num_calls: int = 0
    noticed_s: list[float] = field(default_factory=list)  # from a change to the router that knows it


class Callers:
    """Some routers and their targets."""

    def __init__(self, numbers: range, key: bytes) -> None:
        self._numbers = numbers
        self._key = key
        self._directory = find_directory(_NAME)
        self._books = Books()

    async def follow(self, seconds: float) -> Books:
        self._books = Books()
        until = time.monotonic() + seconds
        work = [part(number, until) for number in self._numbers for part in (self._router, self._target)]
        await asyncio.gather(*work)
        return self._books

    async def flat_out(self, seconds: float) -> Books:
        self._books = Books()
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._target(number, until, 0.0) for number in self._numbers))
        return self._books

    async def _router(self, number: int, until: float) -> None:
        view, known = DirectoryView(), -1
        demand = {"draft": DraftDemand(0.1, 0.2, 0.3)}
        while (began := time.monotonic()) < until:
            question = Asked(
                router_id=f"r{number}",
                model="m",
                held=view.target_id,
                mark=view.mark,
                drafts=demand,
                targets=TargetDemand(0.5, 0.5),
            )
            told = await self._directory.follow.remote(question)
            self._books.num_calls += 1
            if told is not None:
                view.take(told)
            found = next((entry.model_number for entry in view.entries if entry.worker_id == "draft"), known)
            if found != known and known >= 0:
                self._books.noticed_s.append(time.monotonic() - found / 1e6)
            known = found
            await asyncio.sleep(began + _ASK_PERIOD_S - time.monotonic())

    async def _target(self, number: int, until: float, pause_s: float = _BEAT_S) -> None:
        while time.monotonic() < until:
            answer = await self._directory.heartbeat.remote(entry_of("target", f"t{number}", self._key))
            self._books.num_calls += 1
            await asyncio.sleep(pause_s * answer.stretch)


def measure(callers: list[ActorProxy[Callers]], directory: psutil.Process, method: str, seconds: float) -> list[str]:
    handle, key = find_directory(_NAME), LinkKeys.generate().public
    running = [getattr(one, method).remote(seconds) for one in callers]
    before, began = sum(directory.cpu_times()[:2]), time.monotonic()
    while time.monotonic() - began < seconds:
        ray.get(handle.heartbeat.remote(entry_of("draft", "draft", key, int(time.monotonic() * 1e6))))
        time.sleep(_CHANGE_S if method == "follow" else seconds)
    books: list[Books] = ray.get(running)
    elapsed_s, spent_s = time.monotonic() - began, sum(directory.cpu_times()[:2]) - before
    num_calls = sum(one.num_calls for one in books)
    noticed_ms = 1e3 * np.array([wait for one in books for wait in one.noticed_s] or [np.nan])
    return [
        f"{num_calls / elapsed_s:,.0f}",
        f"{spent_s / elapsed_s:.2f}",
        f"{spent_s / num_calls * 1e6:,.0f}",
        *(f"{np.percentile(noticed_ms, share):,.0f}" for share in (50, 99)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--routers", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=6)
    arguments = parser.parse_args()
    prepare_own_ray("127.0.0.1", 1 << 20)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        directory = get_or_create_directory(_NAME)
        process = psutil.Process(ray.get(directory.__ray_call__.remote(lambda _: os.getpid())))
        key, each = LinkKeys.generate().public, arguments.routers // arguments.processes
        remote = ray.remote(Callers).options(num_cpus=0)
        callers = [remote.remote(range(n * each, (n + 1) * each), key) for n in range(arguments.processes)]
        ray.get([one.flat_out.remote(1.0) for one in callers])  # all are there
        rows = [[name, *measure(callers, process, name, arguments.seconds)] for name in ("follow", "flat_out")]
    finally:
        ray.shutdown()
    header = ("phase", "calls/s", "processors", "us a call", "noticed p50, ms", "p99, ms")
    print(plain_table(f"Directory under {each * arguments.processes} routers", header, rows))


if __name__ == "__main__":
    main()
