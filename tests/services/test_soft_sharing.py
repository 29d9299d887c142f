"""What a router's soft_ngram learns is drafted by another one, and nothing that must stay where it is.

Covers `cluster.cache.soft_sharing`.
"""

import asyncio
import gc
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest

from actors.drafters.registry import create_drafters
from cache_service.counts.soft_exchange import DELTA_BYTES, SoftExchangeSettings
from cache_service.index.epoch_watch import EpochWatchSettings
from cache_service.store.connection import ConnectionSettings, open_client
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings, settings_of
from cluster.config import CacheConfig
from cluster.router.driver import RouterDriver
from cluster.router.metrics import soft_metrics
from paceline_testing.cache_stores import until
from paceline_testing.rounds import learning_core, serve, texts_of, toy_info, toy_request
from paceline_testing.toy_target import ToyTarget

NOWHERE = ConnectionSettings("redis://127.0.0.1:1")
VOCAB_SIZE = 97
EAGER = SoftExchangeSettings(export_every_s=0.0, poll_s=0.01, idle_poll_s=0.01, tick_s=0.1)


class Router:
    """The core of one, with its drafter and what it has of the shared cache."""

    def __init__(self, settings, publish_prompts=False, cache_settings=None, **options):
        given = cache_settings or SharedCacheSettings(soft=EAGER, publish_prompts=publish_prompts)
        self.cache = SharedCache(settings, "model", settings=given)
        drafters = create_drafters(("soft_ngram",), delta_bytes=DELTA_BYTES, options={"soft_ngram": options})
        self.drafter = drafters["soft_ngram"]
        self.sharing = self.cache.share_counts(drafters)
        shared = {"token_sink": self.cache, "soft_sharing": self.sharing}
        self.core = learning_core(toy_info(VOCAB_SIZE), drafters, **shared)
        self.target = ToyTarget(VOCAB_SIZE)

    def answer(self, namespace="a", **fields):
        """The tokens of a request, and how many of them were drafted."""
        self.core.add(request(namespace, **fields), 0.0)
        before = self.core.counters.accepted_tokens["soft_ngram"]
        (tokens,) = texts_of(serve(self.core, self.target.verify)).values()
        assert self.core.counters.drafter_errors == {}
        return tokens, self.core.counters.accepted_tokens["soft_ngram"] - before

    def tick(self):
        self.core.exchange(time.monotonic())
        return self.sharing.stats()

    def num_contexts(self, namespace="a"):
        table = self.drafter.table_of(namespace)
        return 0 if table is None else len(table)


def request(namespace="a", **fields):
    return toy_request(prompt=range(1, 9), namespace=namespace, **fields)


@contextmanager
def router(settings, **options):
    one = Router(settings, **options)
    try:
        yield one
        assert one.sharing is None or one.sharing.stats().faults == 0
    finally:
        if one.sharing is not None:
            one.sharing.exchange.close(20)
        one.cache.close(20)


def has_caught_up(one):
    """Whether it has read something, and nothing more for thirty polls. A folded log has fewer contexts than were
    written."""
    before = one.tick().merged_contexts
    time.sleep(0.3)
    return 0 < before == one.tick().merged_contexts


def written(one):
    """Whether all that it has learnt and may share lies in the store."""
    stats = one.tick()
    return stats.written_bytes > 0 and one.drafter.table_of("a").num_untaken == 0


@pytest.mark.parametrize("order", [2, 3])
def test_a_router_drafts_what_another_one_has_learnt_in_that_namespace_alone(server, order):
    with router(server.settings, order=order) as one, router(server.settings, order=order) as other:
        tokens, cold = one.answer()
        assert until(lambda: written(one))
        for namespace in ("a", "b"):
            other.sharing.follow(namespace)
        assert until(lambda: has_caught_up(other))
        assert other.num_contexts("b") == 0
        again, warm = other.answer()
        assert again == tokens
        assert warm > cold
        stranger, unhelped = other.answer("b")
        assert (stranger, unhelped) == (tokens, cold)


@pytest.mark.parametrize("cache", ["off", "read"])
def test_what_may_not_be_learnt_from_stays_where_it_is(server, cache):
    with router(server.settings, publish_prompts=True) as one:
        one.answer(cache=cache)
        assert one.num_contexts() > 0
        assert (one.drafter.table_of("a").num_untaken, one.sharing.stats().namespaces) == (0, cache == "read")
        assert one.tick().exported_contexts == 0


def test_prompts_are_shared_only_where_that_is_wanted(server):
    untaken = []
    for publish_prompts in (False, True):
        with router(server.settings, publish_prompts=publish_prompts) as one:
            one.answer(max_new_tokens=4)
            untaken.append(one.drafter.table_of("a").num_untaken)
    assert untaken[0] == 0
    assert untaken[1] > 0


@pytest.mark.parametrize("is_idle", [True, False])
def test_counts_come_in_while_there_are_no_rounds(server, is_idle):
    """Neither without requests nor while they wait for a target."""
    with router(server.settings) as one, router(server.settings) as other:
        one.answer()
        assert until(lambda: written(one))

        async def follow():
            driver = RouterDriver(other.core, verify_timeout_s=1.0, draft_deadline_s=0.1)
            if is_idle:
                other.sharing.follow("a")
            else:
                waiting = asyncio.create_task(anext(driver.generate(request())))
            try:
                while other.num_contexts() < one.sharing.stats().exported_contexts:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert driver.failure is None
            finally:
                driver.close()
                if not is_idle:
                    await asyncio.gather(waiting, return_exceptions=True)

        asyncio.run(asyncio.wait_for(follow(), 20))


def test_no_server_costs_no_request():
    with router(NOWHERE) as one:
        tokens, _ = one.answer()
        assert len(tokens) == 40
        one.tick()
        assert until(lambda: one.tick().failures > 0)


def test_a_drafter_that_keeps_nothing_for_others_exchanges_nothing(server):
    with router(server.settings, delta_bytes=0) as one:
        assert one.sharing is None
        assert one.cache.share_counts({}) is None
        one.answer()
        one.core.exchange(time.monotonic())


def test_a_drafter_that_is_gone_leaves_no_exchange_behind():
    cache = SharedCache(NOWHERE, "model")
    try:
        for _ in range(2):
            drafters = create_drafters(("soft_ngram",), delta_bytes=DELTA_BYTES)
            threads = [turns._thread for turns in _turns_of(cache.share_counts(drafters).exchange)]
            assert len(cache._exchanges) == 1
            del drafters
            gc.collect()
            assert cache._exchanges == []
            assert until(lambda them=threads: not any(thread.is_alive() for thread in them))
    finally:
        assert cache.close(20)


def _turns_of(exchange):
    return exchange._turns, exchange._folding


def test_metrics_tell_what_was_exchanged_without_saying_whose_it_is(server):
    with router(server.settings) as one:
        one.answer("secret-tenant")
        exported = one.tick().exported_contexts

        class Collector:
            def collect(self) -> list[Metric]:
                return list(soft_metrics(one.sharing.stats()))

        registry = CollectorRegistry()
        registry.register(Collector())
        text = generate_latest(registry).decode()
    assert f"paceline_cache_soft_exported_contexts_total {float(exported)}" in text
    assert "paceline_cache_soft_namespaces 1.0" in text
    assert "secret" not in text


def test_nothing_lives_longer_than_it_is_said_to(server, tmp_path):
    """Whoever begins the data set of a namespace: all else lives as long as that does."""
    given = settings_of(CacheConfig(keep_s=61, index_directory=tmp_path), VOCAB_SIZE)
    quick = replace(given, soft=EAGER.model_copy(update={"keep_s": 61, "compactor": given.soft.compactor}))
    with router(server.settings, cache_settings=quick) as one:
        one.cache.watch("b", one)
        one.sharing.follow("c")
        one.answer()
        assert until(lambda: written(one))
        assert until(lambda: {"b", "c"} <= {key.split(":")[2].rstrip("}") for key in lives(server)})
        assert until(lambda: not one.cache.publisher.queued_tokens)
    found = lives(server)
    assert len(found) > 4
    assert not {key: life for key, life in found.items() if not 0 < life <= 61}


def lives(server):
    """Seconds that each key lives."""
    with open_client(server.settings) as redis:
        return {key.decode(): redis.ttl(key) for key in redis.scan_iter(match="sd:*")}


def test_every_setting_reaches_the_exchange():
    soft = settings_of(CacheConfig(keep_s=61, max_namespaces=3), VOCAB_SIZE).soft
    assert (soft.keep_s, soft.compactor.keep_s, soft.max_namespaces) == (61, 61, 3)
    assert settings_of(CacheConfig(max_namespaces=65_536), VOCAB_SIZE).soft.max_namespaces == 4096


@pytest.mark.parametrize(("max_namespaces", "watched"), [(3, 256), (1000, 1000), (65_536, 4096)])
def test_as_many_namespaces_are_watched_as_are_drafted_from(max_namespaces, watched):
    settings = settings_of(CacheConfig(keep_s=61, max_namespaces=max_namespaces), VOCAB_SIZE)
    assert settings.epochs == EpochWatchSettings(max_namespaces=watched, keep_s=61)
