"""Answers with the shared cache are byte for byte those without it, whatever it holds and whatever becomes of it."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from actors.models.loader import read_model_info
from actors.models.source import ModelSource
from cache_service.formats.documents import document_id_of
from cache_service.formats.namespaces import OPEN
from cache_service.formats.store_keys import StoreKeys
from cache_service.log.compactor import CompactorSettings
from cache_service.log.publisher import PublisherSettings
from cache_service.store.connection import ConnectionSettings, open_client
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings
from cluster.offline.engine import LocalEngine
from cluster.router.trace import RoundTrace
from paceline_testing import cache_stores
from paceline_testing.cache_stores import until
from paceline_testing.tiny_models import save_tiny_model

NEW_TOKENS = 32
VOCAB_SIZE = 259
PROMPTS = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm", "ash", "fir")]
GREEDY = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
SAMPLED = {"max_new_tokens": NEW_TOKENS, "temperature": 0.9, "top_p": 0.95, "seed": 7, "ignore_eos": True}
WAYS = [pytest.param(GREEDY, id="greedy"), pytest.param(SAMPLED, id="sampled")]
NOWHERE = ConnectionSettings("redis://127.0.0.1:1")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", 5, hidden_size=48, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def fingerprint(model) -> str:
    return read_model_info(ModelSource("tiny", "tiny", model)).fingerprint


@pytest.fixture(scope="module")
def plain(model) -> Callable[[dict], list[list[int]]]:
    """What is said without drafts."""
    engine = make_engine(model, None, drafters=("none",))
    answers = {}

    def ask_once(way: dict) -> list[list[int]]:
        if way["temperature"] not in answers:
            answers[way["temperature"]] = ask(engine, way)[0]
        return answers[way["temperature"]]

    return ask_once


@pytest.fixture
def server(tmp_path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "server") as server:
        yield server


@contextmanager
def shared_cache(fingerprint: str, settings: ConnectionSettings) -> Iterator[SharedCache]:
    """An impatient one."""
    cache = SharedCache(
        settings,
        fingerprint,
        settings=SharedCacheSettings(
            publisher=PublisherSettings(flush_s=0.01), compactor=CompactorSettings(fold_every_s=0.05)
        ),
    )
    try:
        cache.follow([""])
        yield cache
    finally:
        cache.close(20)
        assert cache.publisher.counters.faults == 0


def make_engine(model: Path, cache: SharedCache | None, drafters: tuple[str, ...] = ("cache",)) -> LocalEngine:
    return LocalEngine(
        str(model), draft_model="none", drafters=drafters, batch_size=2, device="cpu", exact="bitwise",
        kv_cache_tokens=4096, cache=cache,
    )  # fmt: skip


def ask(engine: LocalEngine, way: dict, on_round: Callable[[RoundTrace], None] | None = None):
    """Token ids of every answer, and how many of them each source drafted."""
    generations = engine.generate(PROMPTS, **way, on_round=on_round)
    accepted = sum(generation.accepted_tokens.get("cache", 0) for generation in generations)
    assert engine.core.counters.drafter_errors == {}
    assert engine.core.counters.sink_faults == 0
    return [generation.token_ids for generation in generations], accepted


def publish(cache: SharedCache, name: str, documents: list[list[int]]) -> None:
    """Have the cache hold these, and wait until they can be drafted from."""
    known = cache.stats().index.tokens
    for number, tokens in enumerate(documents):
        cache.committed("", document_id_of(f"{name}{number}"), 0, np.array(tokens, np.int32))
    assert until(lambda: cache.stats().index.tokens >= known + sum(map(len, documents)))


@pytest.mark.parametrize("way", WAYS)
def test_absent_and_out_of_reach(model, fingerprint, plain, drafts_pay, way):
    assert ask(make_engine(model, None), way) == (plain(way), 0)
    with shared_cache(fingerprint, NOWHERE) as cache:
        assert ask(make_engine(model, cache), way) == (plain(way), 0)


@pytest.mark.parametrize("way", WAYS)
def test_empty_then_warm_by_its_own_answers_then_warm_in_another_process(
    model, fingerprint, plain, drafts_pay, server, way
):
    wanted = plain(way)
    with shared_cache(fingerprint, server.settings) as cache:
        engine = make_engine(model, cache)
        assert ask(engine, way)[0] == wanted
        assert until(lambda: cache.stats().index.tokens >= len(PROMPTS) * NEW_TOKENS)
        tokens, accepted = ask(engine, way)
        assert tokens == wanted
        assert accepted > NEW_TOKENS
    with shared_cache(fingerprint, server.settings) as other:
        assert until(lambda: other.stats().index.tokens >= 2 * len(PROMPTS) * NEW_TOKENS)
        tokens, accepted = ask(make_engine(model, other), way)
        assert tokens == wanted
        assert accepted > NEW_TOKENS


@pytest.mark.parametrize("way", WAYS)
def test_poisoned(model, fingerprint, plain, drafts_pay, server, way):
    """Answers that turn wrong after a while, noise, and tokens that the model does not have."""
    wanted = plain(way)
    chance = random.Random(3)
    turned = [[t if i % 5 else chance.randrange(VOCAB_SIZE) for i, t in enumerate(answer)] for answer in wanted]
    noise = [[chance.randrange(VOCAB_SIZE) for _ in range(500)] for _ in range(4)]
    unknown = [[t if i % 3 else VOCAB_SIZE + i for i, t in enumerate(answer)] for answer in wanted]
    with shared_cache(fingerprint, server.settings) as cache:
        for name, documents in (("turned", turned), ("noise", noise), ("unknown", unknown)):
            publish(cache, name, documents)
        assert ask(make_engine(model, cache), way)[0] == wanted


@pytest.mark.parametrize("way", WAYS)
def test_corrupted(model, fingerprint, plain, drafts_pay, server, way):
    """Every key holds something else than it should, while it is followed and when it is read anew."""
    wanted = plain(way)
    keys = StoreKeys(fingerprint, OPEN)
    with open_client(server.settings) as client, shared_cache(fingerprint, server.settings) as cache:
        engine = make_engine(model, cache)
        assert ask(engine, way)[0] == wanted
        assert until(lambda: client.exists(keys.manifest))
        chance = random.Random(5)
        for name in client.keys("sd:*:segment:*"):
            damaged = bytearray(client.get(name))
            for _ in range(4):
                damaged[chance.randrange(len(damaged))] ^= 1 + chance.randrange(255)
            client.set(name, bytes(damaged))
        client.hset(keys.manifest, "body", client.hget(keys.manifest, "body")[:-9])
        for _ in range(8):
            client.xadd(keys.log, {"e": chance.randbytes(200)})
        client.xadd(keys.log, {"other": b"field"})
        assert ask(engine, way)[0] == wanted
        with shared_cache(fingerprint, server.settings) as other:
            assert ask(make_engine(model, other), way)[0] == wanted
        client.delete(keys.log, keys.manifest)
        client.set(keys.log, b"no stream")
        client.set(keys.manifest, b"no hash")
        assert ask(engine, way)[0] == wanted


def flip_epoch(server: EmbeddedServer, fingerprint: str) -> None:
    with open_client(server.settings) as client:
        client.set(StoreKeys(fingerprint, OPEN).epoch, "another")


def flush(server: EmbeddedServer, fingerprint: str) -> None:
    with open_client(server.settings) as client:
        client.flushall()


def kill(server: EmbeddedServer, fingerprint: str) -> None:
    cache_stores.kill(server)


def halt(server: EmbeddedServer, fingerprint: str) -> None:
    os.kill(server.pid, signal.SIGSTOP)


@pytest.mark.parametrize("fault", [flip_epoch, flush, kill, halt])
@pytest.mark.parametrize("way", WAYS)
def test_in_the_middle_of_requests(model, fingerprint, plain, drafts_pay, server, way, fault):
    wanted = plain(way)
    with shared_cache(fingerprint, server.settings) as cache:
        publish(cache, "answers", wanted)
        engine = make_engine(model, cache)
        rounds = []

        def on_round(trace: RoundTrace) -> None:
            rounds.append(trace)
            if len(rounds) == 3:
                fault(server, fingerprint)

        tokens, _ = ask(engine, way, on_round)
        assert tokens == wanted
        assert len(rounds) > 3
        assert ask(engine, way)[0] == wanted
        if fault is halt:
            os.kill(server.pid, signal.SIGCONT)
        elif fault is kill:
            server.restart()

        def drafts_are_accepted_again() -> bool:
            # Not once: the index may still hold what the fault took, and lose it during the request.
            tokens, accepted = ask(engine, way)
            assert tokens == wanted
            return accepted > 0

        assert until(drafts_are_accepted_again)
