"""The directory: the registry itself, then as an actor of a real Ray that is killed and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psutil
import pytest
import ray
from ray.actor import ActorProxy
from ray.exceptions import RayError

from actors.links.client import AsyncLink
from actors.links.heartbeat import Heartbeat
from actors.links.keys import LinkAddress, LinkKeys
from actors.links.server import LinkServer
from actors.messages import Hello, WorkerInfo
from actors.workers.directory import Asked, Directory, WorkerEntry
from actors.workers.directory_actor import NAMESPACE, DirectoryHandle, find_directory, get_or_create_directory
from actors.workers.directory_contact import DirectoryContact
from actors.workers.registration import Registration
from cluster.router.directory_view import DirectoryView
from paceline_testing.clock import Clock

PATIENCE_S = 60.0  # how long a busy machine may take to start a process


def entry_of(worker_id: str, incarnation: int = 1, role: str = "draft") -> WorkerEntry:
    address = LinkAddress(f"tcp://127.0.0.1:{1000 + incarnation}", LinkKeys.generate().public)
    return WorkerEntry("target" if role == "target" else "draft", worker_id, address, incarnation)


def until(condition: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < PATIENCE_S, "waited in vain"
        time.sleep(0.02)


class ToldServer(LinkServer):
    """Remembers whom it was told to admit."""

    def __init__(self) -> None:
        super().__init__(LinkKeys.generate(), [])
        self.told: list[tuple[bytes, ...]] = []

    def allow(self, client_public_keys: Iterable[bytes]) -> None:
        self.told.append(tuple(client_public_keys))
        super().allow(self.told[-1])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Directory:
    return Directory(LinkKeys.generate(), ttl_s=4.0, clock=clock)


# --- the registry


def test_workers_are_listed_by_role_and_in_order(registry: Directory) -> None:
    target, second, first = entry_of("t", role="target"), entry_of("b"), entry_of("a")
    for entry in (target, second, first):
        registry.heartbeat(entry)
    assert registry.workers() == [first, second, target]
    assert registry.workers("draft") == [first, second]
    assert registry.workers("target") == [target]


def test_an_entry_that_is_not_renewed_vanishes(registry: Directory, clock: Clock) -> None:
    registry.heartbeat(entry_of("silent"))
    renewed = entry_of("renewed")
    for _ in range(3):
        registry.heartbeat(renewed)
        clock.now += 2.0
    assert registry.workers() == [renewed]
    clock.now += 2.0
    assert registry.workers() == [renewed]  # exactly as old as the limit
    clock.now += 0.01
    assert registry.workers() == []


def test_a_restarted_worker_replaces_its_former_self_for_good(registry: Directory) -> None:
    former, successor = entry_of("a", 1), entry_of("a", 2)
    registry.heartbeat(former)
    registry.heartbeat(successor)
    registry.heartbeat(former)
    assert registry.workers() == [successor]
    registry.remove("a", former.incarnation)
    assert registry.workers() == [successor]


def test_a_worker_that_expired_may_come_back(registry: Directory, clock: Clock) -> None:
    worker = entry_of("a")
    registry.heartbeat(worker)
    clock.now += 10.0
    assert registry.workers() == []
    registry.heartbeat(worker)
    assert registry.workers() == [worker]


def test_a_worker_may_change_its_address(registry: Directory) -> None:
    worker = entry_of("a")
    registry.heartbeat(worker)
    moved = replace(worker, address=entry_of("a", 9).address)
    registry.heartbeat(moved)
    assert registry.workers() == [moved]


def test_a_worker_that_leaves_is_gone_at_once_and_leaving_twice_is_fine(registry: Directory) -> None:
    worker = entry_of("a")
    registry.heartbeat(worker)
    registry.remove("a", worker.incarnation)
    registry.remove("a", worker.incarnation)
    assert registry.workers() == []


def test_workers_learn_the_public_key_only(registry: Directory) -> None:
    keys = registry.client_keys()
    assert registry.heartbeat(entry_of("a")).clients == (keys.public,)


# --- the background beat


def test_a_heartbeat_goes_on_after_beats_that_failed() -> None:
    beats: list[int] = []

    def beat() -> None:
        beats.append(len(beats))
        if len(beats) < 3:
            raise ConnectionError("not yet")

    heartbeat = Heartbeat(beat, 0.01, "test")
    until(lambda: len(beats) >= 5)
    heartbeat.stop()
    heartbeat.stop()
    count = len(beats)
    time.sleep(0.05)
    assert len(beats) == count


# --- the actor


def process_of(actor: Any) -> int:
    """Its process id; 0 while it restarts."""
    try:
        pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=PATIENCE_S)
    except ray.exceptions.RayActorError:
        return 0
    return pid


def workers_of(directory: DirectoryHandle) -> list[WorkerEntry]:
    """What the directory lists; nothing while it restarts."""
    try:
        entries: list[WorkerEntry] = ray.get(directory.workers.remote(), timeout=PATIENCE_S)
    except ray.exceptions.RayActorError:
        return []
    return entries


def keys_of(directory: DirectoryHandle) -> LinkKeys:
    keys: LinkKeys = ray.get(directory.client_keys.remote(), timeout=PATIENCE_S)
    return keys


@pytest.mark.usefixtures("ray_here")
def test_everybody_who_asks_for_a_name_gets_the_same_directory() -> None:
    first = get_or_create_directory("same")
    second = get_or_create_directory("same")
    assert keys_of(first) == keys_of(second) == keys_of(find_directory("same"))
    assert keys_of(get_or_create_directory("other")) != keys_of(first)


@pytest.mark.usefixtures("ray_here")
def test_a_name_that_nobody_made_is_not_found() -> None:
    with pytest.raises(ValueError, match="nobody"):
        find_directory("nobody")


@pytest.mark.usefixtures("ray_here")
def test_a_killed_directory_comes_back_with_the_same_keys_and_fills_again() -> None:
    directory = get_or_create_directory("killed")
    entries = [entry_of("a"), entry_of("b"), entry_of("t", role="target")]
    server = ToldServer()
    registrations = [Registration("killed", entry, server, interval_s=0.2) for entry in entries]
    until(lambda: workers_of(directory) == entries)
    keys, process = keys_of(directory), process_of(directory)

    os.kill(process, signal.SIGKILL)
    until(lambda: process_of(directory) not in (0, process))  # and so it begins with an empty registry
    until(lambda: workers_of(directory) == entries)
    assert keys_of(directory) == keys
    assert set(server.told) == {(keys.public,)}

    registrations[0].leave()
    assert workers_of(directory) == entries[1:]
    for registration in registrations[1:]:
        registration.leave()
    assert workers_of(directory) == []
    server.close()


@pytest.mark.usefixtures("ray_here")
def test_what_a_workers_link_drops_is_told_with_its_heartbeats() -> None:
    directory = get_or_create_directory("drops")
    entry = entry_of("w")
    with LinkServer(LinkKeys.generate(), []) as server:
        registration = Registration("drops", entry, server, interval_s=0.1)
        until(lambda: workers_of(directory) == [entry])
        server.stats.drop("garbage")
        server.stats.drop("garbage")
        server.stats.drop("unauthenticated")
        until(lambda: workers_of(directory) == [replace(entry, link_drops=(("garbage", 2), ("unauthenticated", 1)))])
        registration.leave()
    assert workers_of(directory) == []


@pytest.mark.usefixtures("ray_here")
def test_a_registration_waits_for_a_directory_that_does_not_exist_yet() -> None:
    entry = entry_of("early")
    with LinkServer(LinkKeys.generate(), []) as server:
        registration = Registration("later", entry, server, interval_s=0.1)
        time.sleep(0.3)
        directory = get_or_create_directory("later")
        until(lambda: workers_of(directory) == [entry])
        registration.leave()


class Worker:
    """A worker process with a link server in it, as the cluster runs them."""

    def __init__(self, directory_name: str) -> None:
        self._server = LinkServer(LinkKeys.generate(), [])
        self._entry = WorkerEntry("target", "t", self._server.address, 1)
        self._registration = Registration(directory_name, self._entry, self._server, interval_s=0.2)

    @ray.method
    def serve(self) -> None:
        while True:
            read = self._server.recv(0.5)
            if read is not None and isinstance(read[1], Hello):
                self._server.send(read[0], WorkerInfo("target", 1, 100, 2048, 16, 64))


@pytest.mark.usefixtures("ray_here")
def test_a_router_finds_a_worker_and_a_directory_made_anew_lets_new_routers_in() -> None:
    async def greet(directory: DirectoryHandle) -> WorkerInfo:
        entries: list[WorkerEntry] = []
        while not entries:
            entries = await directory.workers.remote("target")
            await asyncio.sleep(0.02)
        link = AsyncLink(entries[0].address, await directory.client_keys.remote())
        try:
            answer = await link.call(Hello(), PATIENCE_S)
            assert isinstance(answer, WorkerInfo)
            return answer
        finally:
            link.close()

    directory = get_or_create_directory("anew")
    former_keys = keys_of(directory)
    worker: ActorProxy[Worker] = ray.remote(Worker).options(num_cpus=0).remote("anew")
    worker.serve.remote()
    assert asyncio.run(greet(directory)).role == "target"

    ray.kill(directory)
    until(lambda: not exists("anew"))
    directory = get_or_create_directory("anew")
    assert keys_of(directory) != former_keys
    assert asyncio.run(greet(directory)).role == "target"
    ray.kill(worker)


def exists(name: str) -> bool:
    try:
        find_directory(name)
    except ValueError:
        return False
    return True


def relays_of(directory: DirectoryHandle) -> list[Any]:
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [one["name"] for one in named if one["name"].endswith(directory._actor_id.hex())]
    return [ray.get_actor(name, namespace=NAMESPACE) for name in sorted(names)]


def calls_directly(directory: DirectoryHandle) -> list[str]:
    """Who has called the directory lately, and not by a relay. Nobody in particular while it restarts."""
    try:
        call = directory.__ray_call__.remote(lambda own: [name for name in own._records._held if name in own._direct])
        return list(ray.get(call, timeout=PATIENCE_S))
    except ray.exceptions.RayActorError:
        return ["?"]


async def target_of(router_id: str, contact: DirectoryContact) -> str | None:
    """The target group that a router gets from whom it is to call."""
    view = DirectoryView()
    async with asyncio.timeout(PATIENCE_S):
        while view.target_id is None:
            try:
                told = await contact.find().follow.remote(Asked(router_id=router_id, model="", mark=view.mark))
            except (RayError, ValueError) as error:
                contact.failed(error)
                await asyncio.sleep(0.1)
                continue
            if told is not None:
                view.take(told)
                contact.answered(told.relay)
    return view.target_id


@pytest.mark.usefixtures("ray_here")
def test_relays_of_many_callers_and_their_directory_may_be_killed_and_nobody_is_lost() -> None:
    directory = get_or_create_directory("relayed", most_callers=2)
    entries = [entry_of(f"w{number}", role="target") for number in range(5)]
    server = ToldServer()
    registrations = [Registration("relayed", entry, server, interval_s=0.2) for entry in entries]
    until(lambda: workers_of(directory) == entries)
    until(lambda: len(relays_of(directory)) == 3 and not calls_directly(directory))
    contact = DirectoryContact("relayed")
    assert asyncio.run(target_of("r", contact)) == "w0"

    stopped = threading.Event()

    def watch() -> list[list[WorkerEntry]]:
        looks = []
        while not stopped.wait(0.05):
            looks.append(workers_of(directory))
        return looks

    watching = ThreadPoolExecutor(1).submit(watch)
    processes = [process_of(relay) for relay in relays_of(directory)]
    for process in processes[:2]:
        os.kill(process, signal.SIGKILL)
    until(lambda: not {0, *processes[:2]} & set(map(process_of, relays_of(directory))))
    until(lambda: not calls_directly(directory))
    stopped.set()
    looks = watching.result()
    assert len(looks) > 10
    assert [one for one in looks if one != entries] == []
    assert asyncio.run(target_of("r", contact)) == "w0"

    former, processes = process_of(directory), list(map(process_of, relays_of(directory)))
    os.kill(former, signal.SIGKILL)
    until(lambda: process_of(directory) not in (0, former))
    until(lambda: workers_of(directory) == entries and not calls_directly(directory))
    assert asyncio.run(target_of("r", contact)) == "w0"
    assert list(map(process_of, relays_of(directory))) == processes

    for registration in registrations:
        registration.leave()
    assert workers_of(directory) == []
    ray.kill(directory)
    until(lambda: not any(map(psutil.pid_exists, processes)))
    server.close()


@pytest.mark.usefixtures("ray_here")
def test_only_a_detached_directory_outlives_its_maker() -> None:
    @ray.remote(num_cpus=0)
    class Maker:
        def __init__(self) -> None:
            self.kept = get_or_create_directory("kept", lifetime="detached")
            self.lost = get_or_create_directory("lost")
            ray.get([self.kept.client_keys.remote(), self.lost.client_keys.remote()])

        def ready(self) -> bool:
            return True

    maker = Maker.remote()
    assert ray.get(maker.ready.remote(), timeout=PATIENCE_S)
    ray.kill(maker)
    until(lambda: not exists("lost"))
    kept = find_directory("kept")
    assert workers_of(kept) == []
    ray.kill(kept)
