"""Exchanges soft n-gram counts between replicas through the shared cache.

The drafting thread calls `tick` between its rounds; tables are touched nowhere else. Two background threads talk to
Redis: one writes local counts and reads those of others, the other one folds the log. Nothing here raises into a round
or waits for the network; lost counts cost drafts, never an answer.

A table is filled by one feed. When the feed ends (the epoch changed, the log was trimmed past the reader, the table was
evicted), its counts are dropped and a new feed starts with a new origin. So no counts are added twice, except for a
write whose answer was lost, and nothing of a purged epoch stays or returns.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol

from pydantic import Field

from cache_service.counts.soft_codec import MAX_DELTA_CONTEXTS, ORIGIN_BYTES, Delta, area_of, encode_delta
from cache_service.counts.soft_compactor import SoftCompactor, SoftCompactorSettings
from cache_service.counts.soft_ngram import MAX_ORDER, Entries, SoftNgramTable
from cache_service.counts.soft_reader import READ_ENTRIES, SoftReader
from cache_service.errors import FormatError, StoreError, StoreRefused
from cache_service.formats.frame import FrameCodec
from cache_service.formats.namespaces import PUBLIC
from cache_service.log.fenced_fold import Folding
from cache_service.log.log_feed import REST_S, LogFeed, Subscription
from cache_service.options import KeepSeconds, Options, PollSeconds
from cache_service.store.circuit_breaker import CircuitBreaker
from cache_service.store.fair_share import first_to_give_way
from cache_service.store.store import KEEP_S, OpenNamespace
from cache_service.store.turns import Turns

log = logging.getLogger(__name__)

DELTA_BYTES = 1 << 20
"""A good size for the delta of a table: 16,384 contexts, one stream entry."""

MAX_NAMESPACES = 4096  # the most that settings may allow

_MERGED_AT_ONCE = 256  # contexts between two looks at the clock, about 0.1 ms


class SoftTables(Protocol):
    """Owner of the tables: the `soft_ngram` drafter. Only `tick` uses it."""

    @property
    def order(self) -> int: ...

    def table_of(self, namespace: str) -> SoftNgramTable | None:
        """None if the namespace has no table."""

    def merge_entries(self, namespace: str, entries: Entries) -> None:
        """Add contexts to the namespace's table, which is created if missing."""

    def drop_namespace(self, namespace: str) -> None:
        """Drop the namespace's table with its delta."""


class SoftExchangeSettings(Options):
    """Limits of the exchange."""

    order: Annotated[int, Field(ge=1, le=MAX_ORDER)] = 3  # order of the tables
    tick_s: Annotated[float, Field(ge=0.00001, le=1)] = 0.001  # longest time a tick spends on incoming counts
    export_every_s: Annotated[float, Field(ge=0.0, le=3600)] = 2.0  # at most one table a tick
    # Beyond it, the owner with most loses its least recently used namespace.
    max_namespaces: Annotated[int, Field(ge=1, le=MAX_NAMESPACES)] = 64
    max_incoming_contexts: Annotated[int, Field(ge=1, le=2**26)] = 2**17  # beyond it, reading pauses
    max_log_entries: Annotated[int, Field(ge=1, le=65_536)] = 128  # kept in the stream of a namespace
    keep_s: KeepSeconds = KEEP_S  # time to live of a stream after its last entry
    poll_s: PollSeconds = 0.5  # after new entries; doubles up to idle_poll_s without any
    idle_poll_s: PollSeconds = 2.0
    retry_s: PollSeconds = 0.2  # after a fault; doubles up to max_retry_s
    max_retry_s: PollSeconds = 5.0
    folds: bool = True  # whether this process may compact the log
    compactor: SoftCompactorSettings = Field(default_factory=SoftCompactorSettings)


@dataclass(frozen=True, slots=True)
class SoftExchangeStats:
    """Current values (the first three), and counts since the start."""

    namespaces: int  # being exchanged
    waiting_contexts: int  # read but not yet added
    warm_ratio: float  # share of the parts that have been read, the least of all namespaces
    merged_contexts: int
    exported_contexts: int
    written_bytes: int
    refused_contexts: int  # refused by Redis
    corrupt: int  # entries, parts and manifests that could not be used
    resets: int  # feeds that began again
    failures: int  # attempts with Redis unavailable or refusing
    faults: int  # exceptions in the exchange itself; each one is a bug


@dataclass(slots=True, eq=False)
class _Feed:
    """State of reading a namespace since one start, and the counts that wait to be written."""

    namespace: str
    reader: SoftReader
    listener: _Listener
    codec: FrameCodec  # for writing, in the reading thread
    breaker: CircuitBreaker
    idle_s: float
    subscription: Subscription | None
    outgoing: SoftNgramTable | None = None  # delta that was taken, on its way
    unwritten: Entries | None = None  # what of `outgoing` is not in Redis yet
    table: weakref.ref[SoftNgramTable] | None = None  # the table being filled
    exported: float = -1e9
    awaits_drop: bool = False  # the previous feed's table has not been dropped yet


@dataclass(slots=True)
class _Incoming:
    feed: _Feed
    entries: Entries
    done: int = 0  # rows that have been added

    @property
    def num_left(self) -> int:
        return len(self.entries.keys) - self.done


@dataclass(slots=True)
class _Listener:
    """Passes a reader's counts to the exchange."""

    exchange: SoftExchange
    namespace: str
    feed: _Feed | None = None

    def counts(self, entries: Entries) -> None:
        feed = self.feed  # another thread may clear it
        if feed is not None:
            self.exchange._enqueue(feed, entries)

    def reset(self) -> None:
        feed = self.feed
        if feed is not None:
            self.exchange._begin_again(feed)


class SoftExchange:
    """Exchanges the counts of any number of namespaces. No method raises for a fault of the store."""

    def __init__(
        self,
        open_namespace: OpenNamespace,
        settings: SoftExchangeSettings | None = None,
        make_turns: Callable[[str], Turns] = Turns,
        feed: LogFeed | None = None,
    ) -> None:
        """make_turns: starts a named background thread. feed: tells when there is something to read; None: logs are
        polled."""
        self._open_namespace = open_namespace
        self._settings = settings or SoftExchangeSettings()
        self._feed = feed
        self._lock = threading.Lock()
        self._feeds: dict[str, _Feed] = {}  # least recently followed first
        self._incoming: deque[_Incoming] = deque()
        self._waiting = 0  # contexts in _incoming
        self._to_drop: set[str] = set()  # namespaces whose tables the next tick drops
        self._compactors: dict[str, SoftCompactor] = {}
        self._last_folded: Folding = weakref.WeakSet()
        self._merged = self._exported = self._written_bytes = self._refused = 0
        self._corrupt = self._resets = self._failures = self._faults = 0
        self._turns = make_turns("cache-soft")
        self._turns.at_end = self._unfollow  # not in `close`: a finalizer that calls it must not wait for a lock
        self._folding = make_turns("cache-soft-compactor") if self._settings.folds else None

    def follow(self, namespace: str) -> None:
        """Exchange a namespace's counts from now on; call it for every request. Cheap, and never raises."""
        if namespace == PUBLIC:  # only the promotion gate writes it
            return
        with self._lock:
            known = self._feeds.pop(namespace, None)
            if known is not None:
                self._feeds[namespace] = known
                return
        try:
            self._start(namespace)
        except Exception:
            self._fault()
        while True:
            with self._lock:
                names = list(self._feeds)
            if len(names) <= self._settings.max_namespaces:
                return
            self.forget(first_to_give_way(names))  # with its table: without a feed, purges are not noticed

    def forget(self, namespace: str) -> None:
        """Stop exchanging it; the next tick drops its table."""
        self._stop(namespace)
        with self._lock:
            self._to_drop.add(namespace)

    def begin_again(self, namespace: str) -> None:
        """If the namespace is exchanged, drop its table in the next tick and read it again. Never raises."""
        with self._lock:
            feed = self._feeds.get(namespace)
        try:
            if feed is not None:
                self._begin_again(feed)
        except Exception:
            self._fault()

    def tick(self, tables: SoftTables, now: float) -> None:
        """Add incoming counts to the tables for about `tick_s`, and take the delta of one table. A growing table takes
        a fraction of a millisecond longer, up to two where its memory is first touched.

        Call it between rounds, in the thread that owns the tables, and regularly while there are no rounds. now:
        monotonic seconds. Never raises.
        """
        try:
            if tables.order != self._settings.order:
                raise ValueError(f"tables have order {tables.order}; the exchange has {self._settings.order}")
            self._drop_tables(tables)
            self._take_in(tables)
            self._give_out(tables, now)
        except Exception:
            self._fault()

    @property
    def stats(self) -> SoftExchangeStats:
        with self._lock:
            feeds = list(self._feeds.values())
        return SoftExchangeStats(
            namespaces=len(feeds),
            waiting_contexts=self._waiting,
            warm_ratio=min((feed.reader.warm_ratio for feed in feeds), default=1.0),
            merged_contexts=self._merged,
            exported_contexts=self._exported,
            written_bytes=self._written_bytes,
            refused_contexts=self._refused,
            corrupt=self._corrupt + sum(feed.reader.counters.unread for feed in feeds),
            resets=self._resets,
            failures=self._failures,
            faults=self._faults,
        )

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the threads; False if one still waits for Redis after `timeout_s`. What is not written is lost."""
        deadline = time.monotonic() + timeout_s
        closed = [self._turns.close(timeout_s)]
        if self._folding is not None:
            closed.append(self._folding.close(max(0.0, deadline - time.monotonic())))
        return all(closed)

    # --- in the thread that owns the tables

    def _drop_tables(self, tables: SoftTables) -> None:
        if not self._to_drop:
            return
        with self._lock:
            names, self._to_drop = self._to_drop, set()
            for name in names:
                tables.drop_namespace(name)
                feed = self._feeds.get(name)
                if feed is not None:
                    feed.awaits_drop = False

    def _take_in(self, tables: SoftTables) -> None:
        deadline = time.perf_counter() + self._settings.tick_s
        while self._incoming:
            with self._lock:
                if not self._incoming or self._incoming[0].feed.awaits_drop:
                    return
                item = self._incoming.popleft()
                self._waiting -= item.num_left
            if self._has_table(item.feed, tables):
                part = item.entries.rows(slice(item.done, item.done + _MERGED_AT_ONCE))
                tables.merge_entries(item.feed.namespace, part)
                self._fills(item.feed, tables.table_of(item.feed.namespace))
                item.done += len(part.keys)
                self._merged += len(part.keys)
                with self._lock:
                    if item.num_left and self._feeds.get(item.feed.namespace) is item.feed:
                        self._incoming.appendleft(item)
                        self._waiting += item.num_left
            if time.perf_counter() >= deadline:
                return

    def _give_out(self, tables: SoftTables, now: float) -> None:
        with self._lock:
            due = [feed for feed in self._feeds.values() if now - feed.exported >= self._settings.export_every_s]
        for feed in due:
            feed.exported = now
            if feed.awaits_drop or not self._has_table(feed, tables):
                continue
            table = tables.table_of(feed.namespace)
            if table is None or feed.outgoing is not None:
                continue  # the delta goes on growing in the table
            delta = table.take_delta()
            if delta is not None:
                self._fills(feed, table)
                self._exported += len(delta)
                feed.outgoing = delta
                self._turns.hasten(feed.namespace)
                return

    def _fills(self, feed: _Feed, table: SoftNgramTable | None) -> None:
        if feed.table is None and table is not None:
            feed.table = weakref.ref(table)

    def _has_table(self, feed: _Feed, tables: SoftTables) -> bool:
        """Whether the table that this feed fills still exists, or it has filled none. If it was evicted, the feed
        begins again if there is a new table, and else stops."""
        if feed.table is None:
            return True
        table = tables.table_of(feed.namespace)
        if table is None:
            self._stop(feed.namespace)
        elif feed.table() is not table:
            self._begin_again(feed)
        else:
            return True
        return False

    # --- in the thread that talks to Redis

    def _turn(self, feed: _Feed) -> float:
        settings = self._settings
        read = feed.reader.counters.contexts
        try:
            self._write(feed)
            has_room = self._waiting < settings.max_incoming_contexts
            has_more = has_room and feed.reader.step()
        except StoreError as error:
            self._failures += 1
            now = time.monotonic()
            if not feed.breaker.is_open:
                log.warning("soft counts of %s cannot be exchanged for now: %s", feed.namespace, error)
            feed.breaker.failed(now)
            return feed.breaker.wait_s(now)
        feed.breaker.succeeded()
        if has_more:
            return 0.0
        if has_room and feed.outgoing is None and feed.reader.is_current:
            feed.idle_s = settings.poll_s
            return REST_S
        is_idle = feed.reader.counters.contexts == read and feed.outgoing is None
        feed.idle_s = min(2 * feed.idle_s, settings.idle_poll_s) if is_idle else settings.poll_s
        return feed.idle_s

    def _write(self, feed: _Feed) -> None:
        """Append the taken delta to the log, if the epoch is still the one being read."""
        taken, epoch = feed.outgoing, feed.reader.epoch
        if taken is None or epoch is None:
            return
        if feed.unwritten is None:
            feed.unwritten = taken.entries()
        while len(feed.unwritten.keys):
            part = feed.unwritten.rows(slice(MAX_DELTA_CONTEXTS))
            try:
                frame = encode_delta(feed.codec, self._settings.order, Delta(feed.reader.origin, epoch, part))
                appended = feed.reader.store.append_in_epoch(
                    epoch, frame, self._settings.max_log_entries, self._settings.keep_s
                )
            except (StoreRefused, FormatError) as error:
                log.debug("soft counts of %s are dropped: %s", feed.namespace, error)
                self._refused += len(feed.unwritten.keys)
                break
            if appended is None:
                return  # another epoch; the reader will notice
            self._written_bytes += len(frame)
            feed.unwritten = feed.unwritten.rows(slice(MAX_DELTA_CONTEXTS, None))
        feed.unwritten = feed.outgoing = None
        compactor = self._compactors.get(feed.namespace)
        if self._folding is not None and compactor is not None and compactor.rests:
            compactor.wake()
            self._folding.add(feed.namespace, compactor.turn, self._settings.compactor.fold_every_s)

    def _enqueue(self, feed: _Feed, entries: Entries) -> None:
        with self._lock:
            if self._feeds.get(feed.namespace) is feed:
                self._incoming.append(_Incoming(feed, entries))
                self._waiting += len(entries.keys)

    # --- in any thread

    def _fault(self) -> None:
        self._faults += 1
        if self._faults == 1:
            log.exception("soft counts cannot be exchanged")

    def _start(self, namespace: str) -> None:
        settings = self._settings
        store, reading = self._open_namespace(namespace)
        _, writing = self._open_namespace(namespace)
        listener = _Listener(self, namespace)
        origin = secrets.token_bytes(ORIGIN_BYTES)
        source = None
        if self._feed is not None:
            area = store.beside(area_of(settings.order))
            source = self._feed.follow(area, READ_ENTRIES, settings.poll_s, partial(self._turns.hasten, namespace))
        reader = SoftReader(
            store, reading, settings.order, listener, origin=origin, keep_s=settings.keep_s, source=source
        )
        breaker = CircuitBreaker(1, settings.retry_s, settings.max_retry_s)
        feed = _Feed(
            namespace, reader, listener, codec=writing, breaker=breaker, idle_s=settings.poll_s, subscription=source
        )
        listener.feed = feed
        with self._lock:
            feed.awaits_drop = namespace in self._to_drop
            self._feeds[namespace] = feed
        self._turns.add(namespace, lambda: self._turn(feed))
        if self._folding is not None and namespace not in self._compactors:
            store, codec = self._open_namespace(namespace)
            compactor = SoftCompactor(store, codec, settings.order, settings.compactor, self._last_folded)
            self._compactors[namespace] = compactor
            self._folding.add(namespace, compactor.turn)

    def _begin_again(self, feed: _Feed) -> None:
        """End a feed, have its table dropped, and start a new feed."""
        with self._lock:
            if self._feeds.get(feed.namespace) is not feed:
                return
        self._resets += 1
        self._stop(feed.namespace, keeps_folding=True)
        with self._lock:  # after `_stop`, so that no counts of the old feed follow
            self._to_drop.add(feed.namespace)
        self._start(feed.namespace)

    def _unfollow(self) -> None:
        with self._lock:
            feeds = list(self._feeds.values())
        for feed in feeds:
            if feed.subscription is not None:
                feed.subscription.close()

    def _stop(self, namespace: str, *, keeps_folding: bool = False) -> None:
        with self._lock:
            feed = self._feeds.pop(namespace, None)
            if feed is None:
                return
            self._corrupt += feed.reader.counters.unread
            ended = [item for item in self._incoming if item.feed is feed]
            self._incoming = deque(item for item in self._incoming if item.feed is not feed)
            self._waiting -= sum(item.num_left for item in ended)
        self._turns.remove(namespace)
        if feed.subscription is not None:
            feed.subscription.close()
        feed.listener.feed = None  # break the reference cycle, so that tables are freed at once
        if self._folding is not None and not keeps_folding:
            self._folding.remove(namespace)
            self._compactors.pop(namespace, None)
