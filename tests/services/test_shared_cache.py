"""What a router has of the shared cache: what one commits the others know, namespace by namespace, and an end."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest

from cache_service.formats.documents import RecordKind, document_id_of
from cache_service.formats.key_ring import KeyRing
from cache_service.formats.manifest import Manifest
from cache_service.formats.namespaces import PUBLIC
from cache_service.log.compactor import CompactorSettings
from cache_service.log.log_reader import LogReader
from cache_service.log.publisher import PublisherSettings
from cache_service.store.connection import ConnectionSettings
from cluster.cache.shared_cache import SharedCache, SharedCacheSettings, open_shared_cache, settings_of
from cluster.config import CacheConfig
from cluster.router.metrics import cache_metrics
from paceline_testing.cache_stores import Documents, Namespace, catch_up, until

FINGERPRINT = "weights-tokenizer"
NOWHERE = ConnectionSettings("redis://127.0.0.1:1")
VOCAB_SIZE = 100


@contextmanager
def opened(settings, ring=None, **options):
    options = {
        "publisher": PublisherSettings(flush_s=0.01),
        "compactor": CompactorSettings(fold_every_s=0.05),
    } | options
    cache = SharedCache(settings, FINGERPRINT, ring, SharedCacheSettings(**options))
    try:
        yield cache
    finally:
        cache.close(20)
        assert cache.publisher.counters.faults == 0


def commit(cache, namespace, name, tokens):
    cache.committed(namespace, document_id_of(name), 0, np.array(tokens, np.int32))


def stored(settings, namespace, ring=None):
    """What a reader of the namespace finds: {(document, kind, offset): tokens}."""
    store, codec = SharedCache._open(_Opener(settings, ring), namespace)
    documents = Documents()
    catch_up(LogReader(store, codec, documents))
    return documents.contents


class _Opener:
    _keys = SharedCache._keys

    def __init__(self, settings, ring):
        self._connection, self._ring = Namespace(settings).connection, ring
        self.fingerprint = FINGERPRINT


def test_what_one_router_commits_another_can_draft_from_in_that_namespace_alone(server):
    with opened(server.settings) as one, opened(server.settings) as other:
        other.follow(["a", "b"])
        commit(one, "a", "d", range(10))
        assert until(lambda: other.stats().index.tokens >= 10)
        commit(one, "b", "e", range(20))
        assert until(lambda: other.stats().index.tokens >= 30)
        assert other.stats().index.namespaces == 2
        assert one.stats().index.namespaces == 0
        assert until(lambda: one.stats().folds > 0)
    with opened(server.settings) as later:
        later.follow(["a", "b"])
        assert until(lambda: later.stats().index.tokens >= 30)
        assert later.stats().index.warm_ratio == 1.0


def test_requests_without_a_tenant_have_a_namespace_like_any_other(server):
    with opened(server.settings) as cache:
        commit(cache, "", "d", [1, 2, 3])
    assert stored(server.settings, "") == {(document_id_of("d"), RecordKind.OUTPUT, 0): [1, 2, 3]}


@pytest.mark.parametrize("publish_prompts", [False, True])
def test_prompts_are_learnt_from_only_where_that_is_wanted(server, publish_prompts):
    with opened(server.settings, publish_prompts=publish_prompts) as cache:
        cache.prompted("a", document_id_of("d"), np.array([7, 8], np.int32))
        cache.committed("a", document_id_of("d"), 2, [9])
    found = stored(server.settings, "a")
    assert found.pop((document_id_of("d"), RecordKind.OUTPUT, 2)) == [9]
    assert found == ({(document_id_of("d"), RecordKind.PROMPT, 0): [7, 8]} if publish_prompts else {})


def test_what_is_encrypted_is_nothing_to_those_without_the_key(server):
    ring = KeyRing({1: bytes(32)})
    with opened(server.settings, ring) as cache, opened(server.settings) as stranger:
        stranger.follow(["a"])
        commit(cache, "a", "d", range(10))
        assert until(lambda: stranger.stats().index.damaged > 0)
        assert stranger.stats().index.tokens == 0
    assert list(stored(server.settings, "a", ring).values()) == [list(range(10))]


def test_the_public_pool_is_not_written_to(server):
    with opened(server.settings) as cache:
        for namespace in (PUBLIC, "a"):
            commit(cache, namespace, "d", [1, 2, 3])
    assert cache.publisher.counters.invalid_pieces == 1
    assert stored(server.settings, PUBLIC) == {}
    assert list(stored(server.settings, "a").values()) == [[1, 2, 3]]


def test_the_end_writes_what_is_queued(server):
    with opened(server.settings, publisher=PublisherSettings(flush_s=60.0)) as cache:
        commit(cache, "a", "d", [1, 2, 3])
        assert stored(server.settings, "a") == {}
    assert list(stored(server.settings, "a").values()) == [[1, 2, 3]]


def test_namespaces_that_are_folded_are_bounded_and_their_folds_stay_counted(server):
    with opened(server.settings, max_compacted=3) as cache:
        for number in range(10):
            commit(cache, f"n{number}", "d", range(50))
            assert until(lambda n=number: cache.stats().folds > n)
        assert len(cache._compactors) == len(cache.compactor._turns._tasks) == 3


def held_bytes(settings, namespaces):
    """Bytes of the segments that the newest manifests name."""
    total = 0
    for namespace in namespaces:
        store, codec = SharedCache._open(_Opener(settings, None), namespace)
        manifest = Manifest.decode(codec, store.read_manifest().frame)
        total += sum(generation.num_bytes for generation in manifest.generations)
    return total


def test_the_namespaces_of_a_tenant_hold_no_more_than_it_may_and_the_newest_of_it(server):
    most, random = 20_000, np.random.default_rng(0)
    names = ["a", "a.docs", "a.code"]
    with opened(server.settings, compactor=CompactorSettings(lease_s=0.2, fold_every_s=0.05)) as one:
        for number, namespace in enumerate(names * 10):
            one.bounded(namespace, "t", most)
            commit(one, namespace, f"d{number}", random.integers(0, 50_000, 2_000))  # some 4,000 bytes
            folds = one.stats().folds
            assert until(lambda n=folds: one.stats().folds > n)
        assert until(lambda: held_bytes(server.settings, names) <= most)
        newest = [name for name in names if stored(server.settings, name)]
        assert newest, "of a budget that has room for it, something is left"
    # Another router takes over, and the tenant begins another namespace: the old ones make room for it.
    names.append("a.new")
    with opened(server.settings, compactor=CompactorSettings(lease_s=0.2, fold_every_s=0.05)) as other:
        other.bounded("a.new", "t", most)
        commit(other, "a.new", "n", random.integers(0, 50_000, 500))
        assert until(lambda: other.stats().folds > 0)
        assert until(lambda: other.bounded("a.new", "t", most) or held_bytes(server.settings, names) <= most)
        assert until(lambda: other.bounded("a.new", "t", most) or set(names) <= set(other._compactors))


def test_a_limit_that_comes_later_takes_the_place_of_none_and_loses_nothing(server):
    with opened(server.settings, compactor=CompactorSettings(lease_s=0.2, fold_every_s=0.05)) as cache:
        commit(cache, "a", "d", range(10))
        assert until(lambda: cache.stats().folds > 0)
        cache.bounded("a", "t", 2**40)
        commit(cache, "a", "e", range(10))
        assert until(lambda: cache.stats().folds > 1)
    assert len(stored(server.settings, "a")) == 2


def test_a_limit_that_is_lifted_holds_no_longer(server):
    with opened(server.settings, compactor=CompactorSettings(lease_s=0.2, fold_every_s=0.05)) as cache:
        cache.bounded("a", "t", 1)
        commit(cache, "a", "d", range(10))
        assert until(lambda: cache.stats().folds > 0)
        assert not stored(server.settings, "a")
        cache.bounded("a", "t", None)
        commit(cache, "a", "e", range(10))
        assert until(lambda: cache.stats().folds > 1)
        assert held_bytes(server.settings, ["a"]) > 1


def test_a_request_takes_on_one_namespace_of_its_tenant_at_most(server):
    with opened(server.settings) as cache:
        cache.bounded("a", "t", 1000)
        cache._others.extend((f"a-{number}", cache._budgets["a"]) for number in range(5))
        cache.bounded("a", "t", 1000)
        assert len(cache._compactors) == 2
        cache._others.extendleft((name, cache._budgets["a"]) for name in list(cache._compactors))
        cache.bounded("a", "t", 1000)
        assert len(cache._compactors) == 3


def test_no_name_and_no_server_are_no_fault_of_the_caller():
    with opened(NOWHERE) as cache:
        for namespace in ("", "no name", "a", "x" * 1000):  # what is dropped is not behind what waits
            cache.follow([namespace])
            cache.prompted(namespace, document_id_of("d"), np.array([1], np.int32))
            commit(cache, namespace, "d", [1, 2, 3])
        assert until(lambda: cache.stats().breaker_open)
        assert until(lambda: cache.stats().queued_tokens == 6)  # those without a possible name are dropped
        assert "paceline_cache_breaker_open 1.0" in metrics_text(cache)


def metrics_text(cache):
    class Collector:
        def collect(self) -> list[Metric]:
            return list(cache_metrics(cache.stats()))

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry).decode()


def test_metrics_tell_what_was_shared_without_saying_whose_it_is(server):
    with opened(server.settings) as cache:
        cache.follow(["secret-tenant"])
        commit(cache, "secret-tenant", "d", range(10))
        assert until(lambda: cache.stats().index.tokens >= 10)
        # The follower may have read them before the writer has counted them.
        assert until(lambda: "paceline_cache_written_tokens_total 10.0" in metrics_text(cache))
        text = metrics_text(cache)
    for line in (
        "paceline_cache_published_tokens_total 10.0",
        "paceline_cache_written_tokens_total 10.0",
        "paceline_cache_queued_tokens 0.0",
        "paceline_cache_index_namespaces 1.0",
        'paceline_cache_dropped_tokens_total{reason="overflow"} 0.0',
        'paceline_cache_dropped_tokens_total{reason="purged"} 0.0',
    ):
        assert line in text
    assert "secret" not in text


def test_the_configuration_decides_whether_there_is_one(server, tmp_path, caplog):
    assert open_shared_cache(CacheConfig(), FINGERPRINT, VOCAB_SIZE) is None
    assert open_shared_cache(CacheConfig(url="none"), FINGERPRINT, VOCAB_SIZE) is None
    absent = CacheConfig(url=server.url, password_file=tmp_path / "absent")
    assert open_shared_cache(absent, FINGERPRINT, VOCAB_SIZE) is None
    assert "password_file" in caplog.text
    threads = set(threading.enumerate())
    config = CacheConfig(url=server.url, password_file=server.password_file, publish_prompts=True)
    cache = open_shared_cache(config, FINGERPRINT, VOCAB_SIZE)
    assert cache is not None
    assert cache.stats().index.namespaces == 1
    assert cache.close(20)
    assert not {one for one in threading.enumerate() if one.is_alive()} - threads


def test_every_setting_reaches_its_part():
    config = CacheConfig(
        keep_s=61,
        max_queued_tokens=2048,
        publish_prompts=True,
        max_namespaces=3,
        index_tokens=5000,
        namespace_tokens=4000,
    )
    settings = settings_of(config, VOCAB_SIZE)
    assert (settings.publisher.keep_s, settings.compactor.keep_s) == (61, 61)
    assert settings.publisher.max_queued_tokens == 2048
    assert settings.publish_prompts
    index = settings.index
    assert (index.max_namespaces, index.index_tokens, index.namespace_tokens) == (3, 5000, 4000)
    assert index.vocab_size == VOCAB_SIZE
