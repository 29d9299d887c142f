"""When a worker calls the directory, and what it takes from the answers."""

from __future__ import annotations

from types import SimpleNamespace

from actors.links.keys import LinkAddress, LinkKeys
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


def test_the_interval_is_as_long_as_the_directory_asks_and_a_call_that_fails_is_repeated_at_once(monkeypatch):
    def get(answer: HeartbeatAnswer | None, timeout: float) -> HeartbeatAnswer:
        if answer is None:
            raise TimeoutError
        return answer

    answers = [HeartbeatAnswer((KEYS.public,), WantedModel(spec), stretch) for spec, stretch in (("a", 1), ("b", 3))]
    directory, server = Directory(answers[0], answers[1], None, None, answers[0]), Server()
    monkeypatch.setattr(module, "find_directory", lambda name: directory)
    monkeypatch.setattr(module.ray, "get", get)
    beats = []
    monkeypatch.setattr(module, "Heartbeat", lambda beat, *_: beats.append(beat))
    entry = WorkerEntry("draft", "d", LinkAddress("tcp://127.0.0.1:1000", KEYS.public), 1)
    registration = Registration("name", entry, server)  # type: ignore[arg-type]
    assert registration.wanted is None
    left = []
    for _ in range(7):
        try:
            beats[0]()
        except TimeoutError:
            left.append("failed")
        else:
            left.append(str(len(directory.answers)))
    assert left == ["4", "3", "3", "3", "failed", "failed", "0"]
    assert registration.wanted == WantedModel("a")
    assert server.told == [(KEYS.public,)] * 3
