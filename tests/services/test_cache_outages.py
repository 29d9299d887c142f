"""Redis absent, stopped, killed, full, read-only, flushed, lying: callers notice nothing, and it passes.

Covers also `cache_service.store.answers` and `cache_service.store.scripts`.
"""

import logging
import os
import random
import signal
import socketserver
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from cache_service.errors import StoreUnavailable
from cache_service.log.compactor import CompactorSettings, CompactorThread
from cache_service.log.follower import Follower, FollowerSettings
from cache_service.log.log_feed import LogFeed
from cache_service.log.publisher import Publisher, PublisherSettings
from cache_service.store.circuit_breaker import CircuitBreaker
from cache_service.store.connection import ConnectionSettings
from cache_service.store.embedded_server import EmbeddedServer
from paceline_testing.cache_stores import Documents, Namespace, contents, kill, piece, until

NAME = "tenant"


class Cache:
    """Publisher, follower and compactor of one namespace, all impatient."""

    def __init__(self, settings, **publishing):
        self.namespace = Namespace(replace(settings, read_timeout_s=0.2, connect_timeout_s=0.2), NAME)
        self.given = []
        self.documents = Documents()
        self.publisher = Publisher(
            self.namespace.open,
            PublisherSettings(flush_s=0.01, **publishing),
            CircuitBreaker(first_pause_s=0.05, max_pause_s=0.2),
        )
        self.feed = LogFeed(self.namespace.connection.settings)
        self.follower = Follower(
            self.namespace.open,
            FollowerSettings(poll_s=0.01, idle_poll_s=0.02, retry_s=0.02, max_retry_s=0.2),
            self.feed,
        )
        self.reader = self.follower.follow(NAME, self.documents)
        self.folding = CompactorThread(self.namespace.open, CompactorSettings(fold_every_s=0.05))
        self.compactor = self.folding.compact(NAME)

    def publish(self, name, tokens=(1, 2, 3)):
        part = piece(name, 0, tokens)
        self.given.append(part)
        self.publisher.publish(NAME, part.document_id, 0, part.token_ids)

    @property
    def is_followed(self):
        """Everything that was published, and nothing else, is what the follower knows."""
        return self.documents.contents == contents(self.given)


@contextmanager
def cache(settings, **publishing):
    cache = Cache(settings, **publishing)
    try:
        yield cache
    finally:
        cache.publisher.close(20)
        assert cache.follower.close(20)
        assert cache.feed.close(20)
        assert cache.folding.close(20)
        assert cache.publisher.counters.faults == 0
        assert cache.follower._turns.num_faults == cache.folding._turns.num_faults == 0


def test_without_redis_the_queue_is_bounded_and_nothing_raises():
    with cache(ConnectionSettings("redis://127.0.0.1:1"), max_queued_tokens=100) as absent:
        for number in range(200):
            absent.publish(f"d{number}")
        assert until(lambda: absent.publisher.counters.breaker_opened == 1)
        assert until(lambda: absent.compactor.counters.failures > 0)
        for number in range(200):
            absent.publish(f"e{number}")
        counters = absent.publisher.counters
        assert absent.publisher.queued_tokens <= 100
        assert counters.overflow_tokens + absent.publisher.queued_tokens == counters.published_tokens == 1200
        assert absent.reader.warm_ratio == 0
        assert not absent.publisher.close(20)


def test_absent_redis_is_told_of_once(caplog):
    with caplog.at_level(logging.INFO), cache(ConnectionSettings("redis://127.0.0.1:1")) as absent:
        absent.publish("a")
        assert until(lambda: absent.publisher.counters.failures > 5)
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1
    assert len([record for record in caplog.records if "cannot be followed" in record.message]) == 1


def test_a_stopped_server_loses_nothing_that_has_room(server):
    with cache(server.settings) as stopped:
        stopped.publish("before")
        assert until(lambda: stopped.is_followed)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            for number in range(50):
                stopped.publish(f"meanwhile{number}")
            assert until(lambda: stopped.publisher.counters.breaker_opened == 1)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        stopped.publish("after")
        assert until(lambda: stopped.is_followed)


def test_a_killed_server_comes_back_with_its_data(engine, tmp_path):
    with EmbeddedServer(tmp_path, engine) as server, cache(server.settings) as killed:
        killed.publish("before")
        assert until(lambda: killed.is_followed)
        killed.namespace.redis.bgrewriteaof()
        assert until(lambda: not killed.namespace.redis.info("persistence")["aof_rewrite_in_progress"])
        killed.namespace.redis.config_set("appendfsync", "always")
        killed.publish("more")
        assert until(lambda: killed.is_followed)
        server_pid = server.pid
        kill(server)
        killed.publish("meanwhile")
        assert until(lambda: killed.publisher.counters.failures > 0)
        server.restart()
        assert server.pid != server_pid
        assert until(lambda: killed.is_followed)


def test_a_server_that_lost_its_data_is_noticed(server):
    with cache(server.settings) as flushed:
        flushed.publish("before")
        assert until(lambda: flushed.is_followed and flushed.compactor.counters.folds)
        flushed.namespace.redis.flushall()
        assert until(lambda: flushed.documents.contents == {})
        flushed.given.clear()
        flushed.publish("after")
        assert until(lambda: flushed.is_followed)
        assert flushed.documents.num_resets == 1


def test_a_flush_under_load_ends_in_agreement(server):
    with cache(server.settings) as flushed:
        for number in range(300):
            flushed.publish(f"d{number}")
            if number % 100 == 50:
                flushed.namespace.redis.flushall()
        assert until(lambda: flushed.publisher.queued_tokens == 0)
        assert until(lambda: flushed.documents.contents == flushed.namespace.read()[0].contents)
        flushed.publish("last")
        assert until(lambda: contents(flushed.given[-1:]).items() <= flushed.documents.contents.items())


def test_a_full_server_drops_and_counts(server):
    with cache(server.settings) as full:
        full.publish("before")
        assert until(lambda: full.is_followed)
        full.namespace.redis.config_set("maxmemory", "1000")
        for number in range(20):
            full.publish(f"lost{number}")
        assert until(lambda: full.publisher.queued_tokens == 0)
        assert (full.publisher.counters.refused_tokens, full.publisher.counters.breaker_opened) == (60, 0)
        full.namespace.redis.config_set("maxmemory", "100mb")
        full.publish("after")
        after = contents(full.given[-1:])
        assert until(lambda: after.items() <= full.documents.contents.items()), "what was before may have been evicted"


def test_a_replica_that_takes_no_writes_drops_and_counts(server):
    with cache(server.settings) as readonly:
        readonly.namespace.redis.replicaof("127.0.0.1", 1)
        readonly.publish("lost")
        assert until(lambda: readonly.publisher.counters.refused_tokens == 3)
        readonly.namespace.redis.replicaof("NO", "ONE")
        readonly.given.clear()
        readonly.publish("after")
        assert until(lambda: readonly.is_followed)


@pytest.mark.parametrize(
    "answer",
    [
        b"+OK\r\n",
        b":7\r\n",
        b"*1\r\n" * 5000,
        b"*3\r\n:1\r\n:2\r\n:3\r\n",
        b"-ERR no\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"\xff\xfe\0garbage\r\n",
    ],
)
def test_a_server_that_lies_is_an_outage(answer):
    with lying_server(lambda _: answer * 4) as settings, cache(settings) as lied_to:
        lied_to.publish("a")
        counters = lied_to.publisher.counters
        assert until(lambda: counters.failures > 3 or counters.refused_tokens == 3)
        assert until(lambda: lied_to.compactor.counters.failures > 1)
        assert lied_to.documents.contents == {}


def test_a_server_that_answers_at_random_is_an_outage():
    source = random.Random(1)
    parts = [
        b"+OK\r\n",
        b"+QUEUED\r\n",
        b"*1\r\n",
        b"*2\r\n",
        b"*3\r\n",
        b":1\r\n",
        b"$1\r\na\r\n",
        b"$-1\r\n",
        b"-NO\r\n",
    ]
    with lying_server(lambda _: b"".join(source.choices(parts, k=6))) as settings, cache(settings) as lied_to:
        counters = lied_to.publisher.counters

        def num_told():
            return counters.failures + counters.refused_tokens + counters.written_tokens

        for number in range(10):
            before = num_told()
            lied_to.publish(f"d{number}")
            assert until(lambda before=before: num_told() > before)


def test_a_log_that_never_ends_is_an_outage():
    entries = b"".join(b"*2\r\n$3\r\n%d-0\r\n*2\r\n$1\r\ne\r\n$0\r\n\r\n" % number for number in (1, 2))
    log = b"+OK\r\n" + 3 * b"+QUEUED\r\n" + b"*3\r\n$1\r\na\r\n$1\r\n0\r\n*2\r\n" + entries

    def answer(asked):
        return log if b"EXEC" in asked else asked.count(b"SETINFO") * b"+OK\r\n"

    with lying_server(answer) as settings:
        store = Namespace(settings, NAME).store
        assert [entry_id for entry_id, _ in store.read_log("0-0", 8).entries] == ["1-0", "2-0"]
        with pytest.raises(StoreUnavailable, match="out of order"):
            list(islice(store.log_after("0-0", 8), 100))


@contextmanager
def lying_server(answer):
    """answer: the bytes for those that were received."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            try:
                while asked := self.request.recv(65536):
                    self.request.sendall(answer(asked))
            except OSError:
                pass

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield ConnectionSettings(f"redis://127.0.0.1:{server.server_address[1]}")
        finally:
            server.shutdown()


def test_publish_takes_anything_and_raises_nothing(namespace):
    publisher = Publisher(namespace.open, PublisherSettings(flush_s=0.01))
    name = namespace.keys.namespace
    good = piece("a", 0, [1])
    for document_id, offset, token_ids in [
        ("text", 0, [1]),
        (b"short", 0, [1]),
        (good.document_id, -1, [1]),
        (good.document_id, 2**31, [1]),
        (good.document_id, None, [1]),
        (good.document_id, 1.5, [1]),
        (good.document_id, 0, [-1]),
        (good.document_id, 0, [2**31]),
        (good.document_id, 0, [[1]]),
        (good.document_id, 0, [1.5]),
        (good.document_id, 0, np.array([1.5])),
        (good.document_id, 0, "text"),
        (good.document_id, 0, None),
    ]:
        publisher.publish(name, document_id, offset, token_ids)
    publisher.publish(["no text"], good.document_id, 0, [1])
    publisher.publish(name, good.document_id, 0, [1], kind=0.5)
    publisher.publish(name, good.document_id, 0, [])
    publisher.publish("not a namespace", good.document_id, 0, [1])
    publisher.publish(name, good.document_id, 0, [1])
    assert publisher.close(20)
    assert (publisher.counters.faults, publisher.counters.invalid_pieces) == (0, 16)
    publisher.publish(name, good.document_id, 1, [2])
    assert namespace.read()[0].contents == contents([good])


def test_a_namespace_that_cannot_be_written_holds_up_no_other(namespace):
    namespace.redis.set(namespace.keys.log, "text")
    other = f"{namespace.keys.namespace}-other"
    publisher = Publisher(namespace.open, PublisherSettings(flush_s=0.01))
    for name in (namespace.keys.namespace, other):
        publisher.publish(name, piece("a", 0, [1]).document_id, 0, [1])
    assert publisher.close(20)
    assert (publisher.counters.refused_tokens, publisher.counters.written_tokens) == (1, 1)


def test_a_part_of_a_cluster_that_is_away_holds_up_no_other(namespace):
    away = Namespace(ConnectionSettings("redis://127.0.0.1:1"), "away")
    publisher = Publisher(
        lambda name: away.open() if name == "away" else namespace.open(name),
        PublisherSettings(flush_s=0.01),
        CircuitBreaker(first_pause_s=0.05, max_pause_s=0.2),
    )
    for name in ("away", namespace.keys.namespace):
        publisher.publish(name, piece("a", 0, [1, 2]).document_id, 0, [1, 2])
    assert until(lambda: publisher.counters.written_tokens == 2)
    assert until(lambda: publisher.queued_tokens == 2)
    assert not publisher.close(20)


def test_a_long_answer_becomes_several_entries_and_small_ones_share_one(namespace):
    publisher = Publisher(namespace.open, PublisherSettings(flush_s=60, entry_tokens=100))
    given = [piece("long", 0, range(1000)), *(piece(f"d{number}", 0, [number]) for number in range(50))]
    for part in given:
        publisher.publish(namespace.keys.namespace, part.document_id, part.offset, part.token_ids)
    assert publisher.close(20)
    assert namespace.redis.xlen(namespace.keys.log) <= 12
    assert namespace.read()[0].contents == contents(given)
