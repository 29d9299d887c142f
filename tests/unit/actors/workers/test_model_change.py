"""A draft worker changes its model at run time, without Ray: the directory is in the process.

Covers `actors.workers.draft_pool`.
"""

import asyncio
import shutil
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from actors.links.keys import LinkKeys
from actors.models.catalog import resolve_model
from actors.options import DraftPoolOptions
from actors.workers import draft_pool
from actors.workers.directory import Directory
from actors.workers.draft_pool import DraftReplica
from actors.workers.model_changes import WantedModel
from actors.workers.settings import DraftSettings
from paceline_testing.tiny_models import save_tiny_model

PATIENCE_S = 30.0


class Replica(DraftReplica):
    """One whose directory is called directly."""

    def __init__(self, settings: DraftSettings, directory: Directory) -> None:
        self.directory = directory
        self.loads = []  # for each load: the model, and whether another one was in memory
        self._before = None
        super().__init__(settings, "no directory")

    def _wanted(self) -> WantedModel:
        return self.directory.wanted_model(self._configured.pool)

    def _tell(self, method: str, *arguments: object) -> object:
        return getattr(self.directory, method)(self._configured.pool, *arguments)

    def _load(self, settings: DraftSettings, number: int) -> None:
        is_in_memory = self._before is not None and self._before() is not None
        self.loads.append((settings.source.name, is_in_memory))
        part = Part()
        self._before = weakref.ref(part)  # stands for what is in memory when a load fails
        super()._load(settings, number)
        self._before = weakref.ref(self._served.worker)


class Part:
    """A part of a model."""


@pytest.fixture
def models(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        save_tiny_model(tmp_path / name, seed=seed)
    shutil.copytree(tmp_path / "b", tmp_path / "broken")
    for file in (tmp_path / "broken").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    return tmp_path


@pytest.fixture
def replica(models, monkeypatch):
    monkeypatch.setattr("ray._private.auto_init_hook.enable_auto_connect", False)  # registration starts no Ray
    monkeypatch.setattr(draft_pool, "_LOOK_AGAIN_S", 0.05)
    options = DraftPoolOptions(device="cpu", kv_cache_tokens=512, enforce_eager=True)
    replica = Replica(DraftSettings(resolve_model(str(models / "a"), models), options), Directory(LinkKeys.generate()))
    yield replica
    replica._stopping.set()
    replica._thread.join()
    replica.__del__()


def followed(replica: Replica, number: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while replica._followed != number or replica._served is None:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_one_model_at_a_time_is_in_memory_and_one_that_cannot_be_loaded_is_refused_once(replica, models):
    followed(replica, 0)
    followed(replica, replica.directory.want_model("draft", str(models / "b")).number)
    followed(replica, replica.directory.want_model("draft", str(models / "broken")).number)
    assert replica.loads == [("a", False), ("b", False), ("broken", False), ("b", False)]
    (reason,) = replica.directory.refusals("draft")
    assert "broken" in reason
    time.sleep(0.3)  # it looks again
    assert len(replica.loads) == 4
    asyncio.run(replica.check_health())


def test_a_directory_that_restarts_during_a_change_gives_nobody_else_a_turn_until_it_is_over(replica, models):
    followed(replica, 0)
    loading, may_load, load = threading.Event(), threading.Event(), replica._load

    def load_slowly(settings: DraftSettings, number: int) -> None:
        loading.set()
        assert may_load.wait(PATIENCE_S)
        load(settings, number)

    replica._load = load_slowly
    wanted = replica.directory.want_model("draft", str(models / "b"))
    assert loading.wait(PATIENCE_S)
    restarted = Directory(LinkKeys.generate(), ttl_s=0.25, is_restarted=True)
    restarted._kept = replica.directory._kept
    replica.directory = restarted
    until = time.monotonic() + 0.4
    while time.monotonic() < until:
        assert not restarted.take_turn("draft", "another worker")
        time.sleep(0.01)
    may_load.set()
    followed(replica, wanted.number)
    until = time.monotonic() + PATIENCE_S
    while not restarted.take_turn("draft", "another worker"):
        assert time.monotonic() < until


class Remote:
    """A handle of a directory that answers, or of one whose actor has died."""

    def __init__(self, directory: Directory | None) -> None:
        self._directory = directory

    def __getattr__(self, method: str) -> SimpleNamespace:
        def call(*arguments: object) -> object:
            if self._directory is None:
                raise RayActorError
            return getattr(self._directory, method)(*arguments)

        return SimpleNamespace(remote=call)


def test_a_worker_finds_the_directory_that_was_made_anew(replica, monkeypatch):
    monkeypatch.setattr(draft_pool, "find_directory", lambda name: Remote(replica.directory))
    monkeypatch.setattr(draft_pool.ray, "get", lambda answer, timeout: answer)
    replica._directory = Remote(None)
    assert DraftReplica._tell(replica, "take_turn", "w") is None
    assert DraftReplica._tell(replica, "take_turn", "w") is True
