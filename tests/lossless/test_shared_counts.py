"""Engines of one process each learn soft n-gram counts from each other through the shared cache, and say the same."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest

from actors.errors import InvalidRequest
from actors.models.loader import read_model_info
from actors.models.source import ModelSource
from cache_service.counts.soft_exchange import SoftExchangeSettings
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings
from cluster.offline.engine import LocalEngine
from paceline_testing.cache_stores import until
from paceline_testing.tiny_models import save_tiny_model

# A fold would merge contexts that were exported twice, and readers would then count fewer.
EAGER = SoftExchangeSettings(export_every_s=0.0, poll_s=0.01, idle_poll_s=0.01, tick_s=0.1, folds=False)
PROMPTS = ["say oak and", "say elm and"]
TOLD = {"max_new_tokens": 48, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", 5, hidden_size=48, heads=4, kv_heads=2)


@pytest.fixture
def server(tmp_path):
    with EmbeddedServer(tmp_path / "server") as server:
        yield server


@contextmanager
def shared_cache(model, server):
    fingerprint = read_model_info(ModelSource("tiny", "tiny", model)).fingerprint
    cache = SharedCache(server.settings, fingerprint, settings=SharedCacheSettings(soft=EAGER))
    try:
        yield cache
    finally:
        threads = [exchange._turns._thread for exchange in cache._exchanges]
        assert {thread.name for thread in threads} == {"cache-soft"}
        assert cache.close(60)
        assert not any(thread.is_alive() for thread in threads)


def make_engine(model, cache):
    """One whose rounds do not depend on the clock, and in which drafts always pay."""
    return LocalEngine(
        str(model), draft_model="none", drafters=("soft_ngram",), device="cpu", exact="bitwise", cache=cache,
        kv_cache_tokens=4096, seconds_of_rows=lambda rows: 0.03 + 1e-6 * rows,
    )  # fmt: skip


def ask(engine, **options):
    """Token ids of the answers, and the rounds of all."""
    generations = engine.generate(PROMPTS, **TOLD, **options)
    assert engine.core.counters.drafter_errors == {}
    return [one.token_ids for one in generations], sum(one.rounds for one in generations)


def give_out(engine, namespace):
    """All that may be shared; contexts that were."""
    sharing = engine.core.soft_sharing

    def is_written():
        engine.core.exchange(time.monotonic())
        table = sharing.tables.table_of(namespace)
        return sharing.stats().written_bytes and not table.num_untaken

    assert until(is_written)
    return sharing.stats().exported_contexts


def test_a_fresh_engine_has_what_another_one_has_learnt_in_that_namespace_alone(model, server):
    tokens, cold = ask(make_engine(model, None))
    with shared_cache(model, server) as first, shared_cache(model, server) as second:
        one, other = make_engine(model, first), make_engine(model, second)
        assert ask(one, namespace="a") == (tokens, cold)
        exported = give_out(one, "a")
        other.core.soft_sharing.follow("a")
        assert until(lambda: other.core.soft_sharing.stats().waiting_contexts == exported)
        assert ask(other, namespace="b") == (tokens, cold)
        assert other.core.soft_sharing.stats().merged_contexts == exported, "taken in before the first round"
        again, warm = ask(other, namespace="a")
        assert again == tokens
        assert warm < 0.75 * cold


def test_what_requests_say_of_the_cache_holds_for_counts(model, server):
    with shared_cache(model, server) as cache:
        engine = make_engine(model, cache)
        tokens, rounds = ask(engine, namespace="a", cache="off")
        assert rounds == sum(map(len, tokens)), "counts are a part of the cache"
        assert engine.core.soft_sharing.stats().namespaces == 0
        assert ask(engine, namespace="a", cache="read")[0] == tokens
        assert engine.core.soft_sharing.stats().namespaces == 1
        assert engine.core.soft_sharing.tables.table_of("a").num_untaken == 0


def test_a_name_that_no_namespace_can_have_is_named(model):
    engine = make_engine(model, None)
    assert engine.core.soft_sharing is None
    with pytest.raises(InvalidRequest, match="namespace is 'a b'; it must be 1-128 characters"):
        engine.generate(PROMPTS, namespace="a b")
    with pytest.raises(InvalidRequest, match="cache is 'write'; it must be 'off', 'read' or 'read_write'"):
        engine.stream(PROMPTS[0], cache="write")


def test_rounds_that_are_told_how_long_they_last_are_the_same_on_any_machine(model):
    def rounds_of(engine):
        rounds = []
        engine.generate(PROMPTS, **TOLD, on_round=lambda trace: rounds.append((trace.rows, trace.verified)))
        return rounds

    first = rounds_of(make_engine(model, None))
    assert rounds_of(make_engine(model, None)) == first
    dear = LocalEngine(
        str(model), draft_model="none", drafters=("soft_ngram",), device="cpu", kv_cache_tokens=4096,
        seconds_of_rows=lambda rows: 0.03 * rows,
    )  # fmt: skip
    assert sum(rows for rows, _ in rounds_of(dear)) < sum(rows for rows, _ in first)
