"""The shared cache in simulated time: one log in the store, and each router's index of what it follows.

Automata, reads and the plan of a fold are the real ones. Publishers, followers and compactors are threads around the
network in production; here they are events with the same periods. Counts of the drafter soft_ngram are not exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cache_service.automata.automata_index import Automata
from cache_service.automata.live_tail import LiveTail
from cache_service.formats.documents import Piece
from cache_service.formats.earnings import Earnings
from cache_service.log.compactor import CompactorSettings
from cache_service.log.follower import FollowerSettings
from cache_service.log.publisher import PublisherSettings
from cluster.simulate.bandwidth import Bandwidth
from cluster.simulate.connection import Connection
from cluster.simulate.events import Action, Events
from cluster.simulate.followed import Followed
from cluster.simulate.options import CostOptions
from cluster.simulate.store_traffic import StoreMeter


class SharedLog:
    """The store, with a compactor for each namespace that is written to."""

    def __init__(self, events: Events, costs: CostOptions) -> None:
        self.events = events
        self.meter = StoreMeter()
        self.is_there = True
        self.bandwidth = Bandwidth(events, costs.store_bytes_per_s)
        self._delay_s = costs.store_s
        self._link_bytes_per_s = costs.store_link_bytes_per_s
        self._entries: dict[str, list[Piece]] = {}
        self._followers: dict[str, list[RouterCache]] = {}
        self._late: list[tuple[str, RouterCache | None]] = []  # that have yet to read what there is
        self._unread: list[tuple[RouterCache, str, list[Piece], float]] = []  # as written; when
        events.every(CompactorSettings().fold_every_s, self._fold)

    def write(self, writer: RouterCache, namespace: str, pieces: list[Piece]) -> None:
        num_bytes = self.meter.write(namespace, sum(len(piece.token_ids) for piece in pieces))
        self._through(num_bytes, writer, self._written, namespace, pieces, num_bytes)

    def _written(self, namespace: str, pieces: list[Piece], num_bytes: float) -> None:
        self._entries.setdefault(namespace, []).extend(pieces)
        self.meter.read_on(namespace, num_bytes)
        delay_s = self._delay_s + FollowerSettings().poll_s / 2
        for follower in self._followers.get(namespace, ()):
            self._read_after(delay_s, num_bytes, follower, namespace, pieces)

    def follow(self, namespace: str, follower: RouterCache | None) -> None:
        """follower: None: its reads are counted, nothing else."""
        self.meter.follow(namespace)
        if follower is not None:
            self._followers.setdefault(namespace, []).append(follower)
        if self.is_there:
            self._begin(namespace, follower)
        else:
            self._late.append((namespace, follower))

    def _begin(self, namespace: str, follower: RouterCache | None) -> None:
        num_bytes = self.meter.read(namespace)
        if follower is not None and (entries := self._entries.get(namespace)):
            self._read_after(self._delay_s, num_bytes, follower, namespace, list(entries))

    def _through(self, num_bytes: float, router: RouterCache, action: Action, *args: object) -> None:
        """Do it when the store and the router's link to it have let so many bytes through."""
        now = self.events.now
        passed_at = max(limit.passed_at(num_bytes, now) for limit in (self.bandwidth, router.bandwidth))
        if passed_at > now:
            self.events.at(passed_at, action, *args)
        else:
            action(*args)

    def _read_after(
        self, delay_s: float, num_bytes: float, follower: RouterCache, namespace: str, pieces: list[Piece]
    ) -> None:
        read = self._read, follower, namespace, pieces, self.events.now
        self.events.after(delay_s, self._through, num_bytes, follower, *read)

    def _read(self, follower: RouterCache, namespace: str, pieces: list[Piece], written_at: float) -> None:
        """A follower that cannot reach the store reads on when it can."""
        self._unread.append((follower, namespace, pieces, written_at))
        self.read_on()

    def read_on(self) -> None:
        unread, self._unread = self._unread, []
        for one in unread:
            follower, namespace, pieces, written_at = one
            if self.reaches(follower):
                self.meter.traffic.reads += 1
                self.meter.traffic.read_delay_s += self.events.now - written_at
                follower.receive(namespace, pieces)
            else:
                self._unread.append(one)

    def link_bandwidth(self) -> Bandwidth:
        """The link of one router to the store."""
        return Bandwidth(self.events, self._link_bytes_per_s)

    def reaches(self, follower: RouterCache) -> bool:
        return self.is_there and not follower.connection.is_cut

    def lose(self) -> None:
        self.is_there = False

    def bring(self) -> None:
        self.is_there = True
        self.read_on()
        late, self._late = self._late, []
        for namespace, follower in late:
            if follower is None or follower in self._followers[namespace]:
                self._begin(namespace, follower)

    def leave(self, namespace: str, follower: RouterCache | None) -> None:
        self.meter.leave(namespace)
        if follower is not None:
            self._followers[namespace].remove(follower)
            self._unread = [one for one in self._unread if one[:2] != (follower, namespace)]

    def _fold(self) -> None:
        for namespace, num_bytes in self.meter.fold().items() if self.is_there else ():
            # What nobody waits for takes its part of the bandwidth, too, but for the link of the router that folds.
            self.bandwidth.passed_at(num_bytes, self.events.now)
            for follower in self._followers.get(namespace, ()):
                self._through(num_bytes, follower, lambda: None)


class RouterCache:
    """One router's side: a `cluster.router.guarded_sink.TokenSink` and the `AutomataIndex` of its drafter."""

    def __init__(self, log: SharedLog, vocab_size: int, most_namespaces: int) -> None:
        self.num_queued = 0  # tokens that wait to be written
        self.connection = Connection(log.events)  # to the store
        self.bandwidth = log.link_bandwidth()
        self._log = log
        self._vocab_size = vocab_size
        self._tails: dict[str, LiveTail] = {}
        self._serials: dict[str, int] = {}
        self._num_followed = 0
        self._followed = Followed(most_namespaces, self._begin, self._end)
        self._queued: dict[str, list[Piece]] = {}
        self._is_flushing = False

    @property
    def index(self) -> RouterCache:
        return self

    def automata(self, namespace: str) -> Automata | None:
        if namespace not in self._followed:
            return None
        self._followed.use(namespace, self._log.events.now)
        return Automata(None, -1, self._tails[namespace], self._serials[namespace])

    def follow(self, namespaces: str | Sequence[str]) -> None:
        """As a sink of several namespaces, as an index of one."""
        for namespace in [namespaces] if isinstance(namespaces, str) else namespaces:
            self._followed.use(namespace, self._log.events.now)

    def close(self) -> None:
        """Follow nothing any more."""
        self._followed.clear()

    def _begin(self, namespace: str) -> None:
        self._tails[namespace] = LiveTail(self._vocab_size)
        self._serials[namespace] = self._num_followed
        self._num_followed += 1
        self._log.follow(namespace, self)

    def _end(self, namespace: str) -> None:
        del self._tails[namespace], self._serials[namespace]
        self._log.leave(namespace, self)

    def cut(self, seconds: float) -> None:
        """It cannot reach the store, but others can."""
        self.connection.cut(seconds)
        self._log.events.after(seconds, self._log.read_on)

    def receive(self, namespace: str, pieces: list[Piece]) -> None:
        tail = self._tails.get(namespace)
        if tail is not None:
            tail.add(pieces)

    def committed(self, namespace: str, document_id: bytes, offset: int, token_ids: np.ndarray) -> None:
        self._queued.setdefault(namespace, []).append(Piece(document_id, offset, token_ids.copy()))
        self.num_queued += len(token_ids)
        if not self._is_flushing:
            self._is_flushing = True
            self._log.events.after(PublisherSettings().flush_s, self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if self._log.reaches(self):
            for namespace, pieces in self._queued.items():
                self._log.write(self, namespace, pieces)
        elif self.num_queued <= PublisherSettings().max_queued_tokens:
            self._is_flushing = True
            self._log.events.after(1.0, self._flush)
            return
        else:
            self._log.meter.traffic.dropped_tokens += self.num_queued
        self._queued.clear()
        self.num_queued = 0

    def prompted(self, namespace: str, document_id: bytes, token_ids: np.ndarray) -> None:
        """Prompts are not published by default."""

    def bounded(self, namespace: str, tenant: str, max_bytes: int | None) -> None:
        """Nothing is purged here, nor limited."""

    def watch(self, namespace: str, learner: object) -> None: ...
    def ended(self, learner: object) -> Sequence[str]:
        return ()

    def answered(self, organisation: str, token_ids: np.ndarray) -> None: ...
    def finished(self, namespace: str, earnings: Earnings) -> None: ...
