"""When a worker calls the directory, and what it takes from the answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import GetTimeoutError

from actors.links.keys import LinkAddress, LinkKeys
from actors.workers import directory_contact
from actors.workers import registration as module
from actors.workers.directory import HeartbeatAnswer, WorkerEntry
from actors.workers.model_changes import WantedModel
from actors.workers.registration import Registration

KEYS = LinkKeys.generate()


class Directory:
    """Its answers are taken one after the other; None: it is away."""

    def __init__(self, *answers: HeartbeatAnswer | None) -> None:
        self.answers = list(answers)
        self.heartbeat = SimpleNamespace(remote=lambda entry: self.answers.pop(0))


class Server:
    stats = SimpleNamespace(dropped={})

    def __init__(self) -> None:
        self.told: list[tuple[bytes, ...]] = []

    def allow(self, keys: tuple[bytes, ...]) -> None:
        self.told.append(keys)


@pytest.fixture
def beat(monkeypatch) -> list[Callable[[], object]]:
    """What is to be called every interval."""
    beats: list[Callable[[], object]] = []

    def heartbeat(beat: Callable[[], object], *_: object) -> SimpleNamespace:
        beats.append(beat)
        return SimpleNamespace(stop=lambda: None)

    monkeypatch.setattr(module, "Heartbeat", heartbeat)
    return beats


def registration_at(directory: object, server: Server, monkeypatch) -> Registration:
    def get(answer: HeartbeatAnswer | None, timeout: float) -> HeartbeatAnswer:
        if answer is None:
            raise GetTimeoutError
        return answer

    monkeypatch.setattr(directory_contact, "find_directory", lambda name: directory)
    monkeypatch.setattr(module.ray, "get", get)
    entry = WorkerEntry("draft", "d", LinkAddress("tcp://127.0.0.1:1000", KEYS.public), 1)
    return Registration("name", entry, server)  # type: ignore[arg-type]


def answer_of(spec: str, stretch: int) -> HeartbeatAnswer:
    return HeartbeatAnswer((KEYS.public,), WantedModel(spec), stretch)


def test_the_interval_is_as_long_as_the_directory_asks_and_a_call_that_fails_is_repeated_at_once(beat, monkeypatch):
    first = answer_of("a", 1)
    directory, server = Directory(first, answer_of("b", 3), None, None, first), Server()
    registration = registration_at(directory, server, monkeypatch)
    assert registration.wanted is None
    left = []
    for _ in range(7):
        try:
            beat[0]()
        except GetTimeoutError:
            left.append("failed")
        else:
            left.append(str(len(directory.answers)))
    assert left == ["4", "3", "3", "3", "failed", "failed", "0"]
    assert registration.wanted == WantedModel("a")
    assert server.told == [(KEYS.public,)] * 3


def test_what_could_not_be_told_at_once_is_told_with_the_next_heartbeat(beat, monkeypatch):
    directory = Directory(answer_of("a", 8), None, answer_of("a", 8))
    registration = registration_at(directory, Server(), monkeypatch)
    beat[0]()
    registration.announce_leaving()
    assert len(directory.answers) == 1
    beat[0]()
    assert not directory.answers


def test_an_entry_never_comes_after_a_newer_one(beat, monkeypatch):
    told, began, may_go_on = [], threading.Event(), threading.Event()

    def heartbeat(entry: WorkerEntry) -> HeartbeatAnswer:
        if not began.is_set():
            began.set()
            may_go_on.wait(5.0)
        told.append(entry.is_leaving)
        return answer_of("a", 1)

    directory = SimpleNamespace(heartbeat=SimpleNamespace(remote=heartbeat))
    registration = registration_at(directory, Server(), monkeypatch)
    threads = [threading.Thread(target=beat[0]), threading.Thread(target=registration.announce_leaving)]
    threads[0].start()
    began.wait(5.0)
    threads[1].start()
    threads[1].join(0.05)
    may_go_on.set()
    for thread in threads:
        thread.join(5.0)
    assert told == [False, True]


def test_a_relay_that_does_not_answer_costs_no_heartbeat(beat, monkeypatch):
    named = replace(answer_of("a", 1), relay="relay")
    directory, relay = Directory(named, answer_of("b", 1)), Directory(None)
    registration = registration_at(directory, Server(), monkeypatch)
    monkeypatch.setattr(directory_contact.ray, "get_actor", lambda name, namespace: relay)
    beat[0]()
    beat[0]()
    assert not relay.answers
    assert registration.wanted == WantedModel("b")


@pytest.mark.parametrize("relay", [None, "relay-0"])
def test_a_worker_that_leaves_tells_the_directory_once_also_if_its_relay_does_not_answer(beat, monkeypatch, relay):
    told = []

    def removing(name: str | None) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *of: told.append((name, *of)))  # and no answer

    directory = Directory(replace(answer_of("a", 1), relay=relay))
    directory.remove = removing(None)  # type: ignore[attr-defined]
    actors = {"relay-0": SimpleNamespace(remove=removing("relay-0"))}
    monkeypatch.setattr(directory_contact.ray, "get_actor", lambda name, namespace: actors[name])
    registration = registration_at(directory, Server(), monkeypatch)
    beat[0]()
    registration.leave()
    assert told == [(name, "d", 1) for name in dict.fromkeys((relay, None))]
