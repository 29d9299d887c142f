"""The directory as an actor of a real Ray under the calls of many routers and their target groups.

    python -m tests.bench.bench_directory [--routers 300] [--seconds 10] [--processes 6] [--most-callers 750]

Two phases: routers follow it as they do in production, and targets beat once a second, while a draft worker changes
every four seconds; then as many heartbeats as callers and directory can do. Callers share the machine's processors.
With more callers than `--most-callers` the directory has relays, whose processor time is given apart.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import ray
from ray.actor import ActorProxy
from ray.exceptions import RayError

from actors.links.keys import LinkAddress, LinkKeys
from actors.workers.demand import DraftDemand, TargetDemand
from actors.workers.directory import MOST_CALLERS, Asked, Role, WorkerEntry
from actors.workers.directory_actor import NAMESPACE, find_directory, get_or_create_directory
from actors.workers.directory_contact import DirectoryContact
from actors.workers.directory_relay import RELAY_TIMEOUT_S
from actors.workers.ray_environment import prepare_own_ray
from cluster.cli.table import plain_table
from cluster.router.directory_view import DirectoryView

_NAME = "bench"
_ASK_PERIOD_S, _ANSWER_TIMEOUT_S = 0.25, 5.0  # as in `cluster.router.deployment`
_HEARTBEAT_TIMEOUT_S = 2.0  # as in `actors.workers.registration`
_BEAT_S = 1.0
_CHANGE_S = 4.0
_SETTLED_S = 15.0


def entry_of(role: Role, name: str, key: bytes, model_number: int = 0) -> WorkerEntry:
    return WorkerEntry(role, name, LinkAddress("tcp://10.0.0.1:20000", key), 1, model="m", model_number=model_number)


@dataclass
class Books:
    num_calls: int = 0
    num_failed: int = 0
    noticed_s: list[float] = field(default_factory=list)  # from a change to the router that knows it


class Callers:
    """Some routers and their targets."""

    def __init__(self, numbers: range, key: bytes) -> None:
        self._numbers = numbers
        self._key = key
        self._contacts = {f"{kind}{number}": DirectoryContact(_NAME) for number in numbers for kind in "rt"}
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
            contact = self._contacts[question.router_id]
            try:
                limit_s = RELAY_TIMEOUT_S if contact.uses_relay else _ANSWER_TIMEOUT_S
                async with asyncio.timeout(view.longest_wait_s + limit_s):
                    told = await contact.find().follow.remote(question)
            except (RayError, TimeoutError) as error:
                self._note_failure(contact, error)
                told = None
            else:
                self._books.num_calls += 1
            if told is not None:
                view.take(told)
                contact.answered(told.relay)
            found = next((entry.model_number for entry in view.entries if entry.worker_id == "draft"), known)
            if found != known and known >= 0:
                self._books.noticed_s.append(time.monotonic() - found / 1e6)
            known = found
            await asyncio.sleep(began + _ASK_PERIOD_S - time.monotonic())

    async def _target(self, number: int, until: float, pause_s: float = _BEAT_S) -> None:
        contact = self._contacts[f"t{number}"]
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(_HEARTBEAT_TIMEOUT_S):
                    answer = await contact.find().heartbeat.remote(entry_of("target", f"t{number}", self._key))
            except (RayError, TimeoutError) as error:
                self._note_failure(contact, error)
                await asyncio.sleep(pause_s)
                continue
            self._books.num_calls += 1
            contact.answered(answer.relay)
            await asyncio.sleep(pause_s * answer.stretch)

    def _note_failure(self, contact: DirectoryContact, error: Exception) -> None:
        contact.failed(error)
        self._books.num_failed += 1


def process_of(actor: Any) -> psutil.Process:
    return psutil.Process(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


def relays() -> list[psutil.Process]:
    names = (one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["name"] != _NAME)
    return [process_of(ray.get_actor(name, namespace=NAMESPACE)) for name in names]


def spent_s(*processes: psutil.Process) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in processes)


def measure(callers: list[ActorProxy[Callers]], method: str, seconds: float) -> list[str]:
    handle, key = find_directory(_NAME), LinkKeys.generate().public
    directory, passing_on = process_of(handle), relays()
    running = [getattr(one, method).remote(seconds) for one in callers]
    before, relays_before, began = spent_s(directory), spent_s(*passing_on), time.monotonic()
    while time.monotonic() - began < seconds:
        ray.get(handle.heartbeat.remote(entry_of("draft", "draft", key, int(time.monotonic() * 1e6))))
        time.sleep(_CHANGE_S if method == "follow" else seconds)
    books: list[Books] = ray.get(running)
    elapsed_s, own_s = time.monotonic() - began, spent_s(directory) - before
    num_calls = sum(one.num_calls for one in books)
    noticed_ms = 1e3 * np.array([wait for one in books for wait in one.noticed_s] or [np.nan])
    return [
        f"{num_calls / elapsed_s:,.0f}",
        f"{sum(one.num_failed for one in books):,}",
        f"{own_s / elapsed_s:.2f}",
        f"{own_s / num_calls * 1e6:,.0f}",
        str(len(passing_on)),
        f"{(spent_s(*passing_on) - relays_before) / elapsed_s:.2f}",
        *(f"{np.percentile(noticed_ms, share):,.0f}" for share in (50, 99)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--routers", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--most-callers", type=int, default=MOST_CALLERS)
    arguments = parser.parse_args()
    prepare_own_ray("127.0.0.1", 1 << 20)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    try:
        kept = get_or_create_directory(_NAME, most_callers=arguments.most_callers)
        key, each = LinkKeys.generate().public, arguments.routers // arguments.processes
        remote = ray.remote(Callers).options(num_cpus=0)
        callers = [remote.remote(range(n * each, (n + 1) * each), key) for n in range(arguments.processes)]
        ray.get([one.follow.remote(_SETTLED_S) for one in callers])  # all are there, and so are relays
        rows = [[name, *measure(callers, name, arguments.seconds)] for name in ("follow", "flat_out")]
        del kept
    finally:
        ray.shutdown()
    header = (
        "phase",
        "calls/s",
        "failed",
        "processors",
        "us a call",
        "relays",
        "processors",
        "noticed p50, ms",
        "p99, ms",
    )
    print(plain_table(f"Directory under {each * arguments.processes} routers", header, rows))


if __name__ == "__main__":
    main()
