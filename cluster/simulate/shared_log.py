"""The shared cache in simulated time: one log in the store, and each router's index of what it follows.

Automata, reads and the plan of a fold are the real ones. Publishers, followers and compactors are threads around the
network in production; here they are events with the same periods. Counts of the drafter soft_ngram are not exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cache_service.automata.automata_index import Automata
from cache_service.automata.live_tail import LiveTail
from cache_service.formats.documents import Piece
from cache_service.formats.earnings import Earnings
from cache_service.log.compactor import CompactorSettings
from cache_service.log.fold_plan import num_absorbed
from cache_service.log.follower import FollowerSettings
from cache_service.log.publisher import PublisherSettings
from cluster.simulate.bandwidth import Bandwidth
from cluster.simulate.connection import Connection
from cluster.simulate.events import Action, Events
from cluster.simulate.options import CostOptions

_TOKEN_BYTES = 2.5  # of a token in an entry or segment, compressed
_ENTRY_BYTES = 80  # of an entry's own


@dataclass(slots=True)
class StoreTraffic:
    """Bytes, and messages to the store."""

    written: float = 0.0
    read: float = 0.0
    rewritten: float = 0.0  # by folds, beside what is new
    messages: int = 0
    reads: int = 0  # that followers have had of what was written
    read_delay_s: float = 0.0  # of all these, since it was written
    dropped_tokens: int = 0  # while the store was away, beyond what publishers keep


@dataclass(slots=True)
class _Namespace:
    entries: list[Piece] = field(default_factory=list)
    followers: list[RouterCache] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)  # tokens of each
    num_unfolded: int = 0  # tokens


class SharedLog:
    """The store, with a compactor for each namespace that is written to."""

    def __init__(self, events: Events, costs: CostOptions) -> None:
        self.events = events
        self.traffic = StoreTraffic()
        self.is_there = True
        self.bandwidth = Bandwidth(events, costs.store_bytes_per_s)
        self._delay_s = costs.store_s
        self._link_bytes_per_s = costs.store_link_bytes_per_s
        self._namespaces: dict[str, _Namespace] = {}
        self._unread: list[tuple[RouterCache, str, list[Piece], float]] = []  # as written; when
        events.every(CompactorSettings().fold_every_s, self._fold)

    def write(self, writer: RouterCache, namespace: str, pieces: list[Piece]) -> None:
        known = self._namespaces.setdefault(namespace, _Namespace())
        num_tokens = sum(len(piece.token_ids) for piece in pieces)
        known.num_unfolded += num_tokens
        num_bytes = _ENTRY_BYTES + _TOKEN_BYTES * num_tokens
        self.traffic.messages += 1
        self.traffic.written += num_bytes
        self._through(num_bytes, writer, self._written, namespace, pieces, num_bytes)

    def _written(self, namespace: str, pieces: list[Piece], num_bytes: float) -> None:
        known = self._namespaces[namespace]
        known.entries += pieces
        self.traffic.messages += len(known.followers)
        self.traffic.read += num_bytes * len(known.followers)
        delay_s = self._delay_s + FollowerSettings().poll_s / 2
        for follower in known.followers:
            self._read_after(delay_s, num_bytes, follower, namespace, pieces)

    def follow(self, namespace: str, follower: RouterCache) -> None:
        known = self._namespaces.setdefault(namespace, _Namespace())
        known.followers.append(follower)
        self.traffic.messages += 1
        if known.entries:
            num_bytes = _TOKEN_BYTES * sum(len(piece.token_ids) for piece in known.entries)
            self.traffic.read += num_bytes
            self._read_after(self._delay_s, num_bytes, follower, namespace, list(known.entries))

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
                self.traffic.reads += 1
                self.traffic.read_delay_s += self.events.now - written_at
                follower.receive(namespace, pieces)
            else:
                self._unread.append(one)

    def link_bandwidth(self) -> Bandwidth:
        """Of one router."""
        return Bandwidth(self.events, self._link_bytes_per_s)

    def reaches(self, follower: RouterCache) -> bool:
        return self.is_there and not follower.connection.is_cut

    def lose(self) -> None:
        self.is_there = False

    def bring(self) -> None:
        self.is_there = True
        self.read_on()

    def leave(self, follower: RouterCache) -> None:
        for known in self._namespaces.values():
            if follower in known.followers:
                known.followers.remove(follower)
        self._unread = [one for one in self._unread if one[0] is not follower]

    def _fold(self) -> None:
        for known in self._namespaces.values() if self.is_there else ():
            if not known.num_unfolded:
                continue
            absorbed = num_absorbed(known.segments, known.num_unfolded, CompactorSettings().limits.segment_tokens)
            rewritten = sum(known.segments[len(known.segments) - absorbed :])
            known.segments[len(known.segments) - absorbed :] = [rewritten + known.num_unfolded]
            num_bytes = _TOKEN_BYTES * known.segments[-1]
            # What nobody waits for takes its part of the bandwidth, too, but for the link of the router that folds.
            self.bandwidth.passed_at(num_bytes, self.events.now)
            for follower in known.followers:
                self._through(num_bytes, follower, lambda: None)
            self.traffic.written += num_bytes
            self.traffic.rewritten += _TOKEN_BYTES * rewritten
            self.traffic.read += num_bytes * len(known.followers)
            self.traffic.messages += 2 + len(known.followers)
            known.num_unfolded = 0


class RouterCache:
    """One router's side: a `cluster.router.guarded_sink.TokenSink` and the `AutomataIndex` of its drafter."""

    def __init__(self, log: SharedLog, vocab_size: int) -> None:
        self.num_queued = 0  # tokens that wait to be written
        self.connection = Connection(log.events)  # to the store
        self.bandwidth = log.link_bandwidth()
        self._log = log
        self._vocab_size = vocab_size
        self._tails: dict[str, LiveTail] = {}
        self._serials: dict[str, int] = {}
        self._queued: dict[str, list[Piece]] = {}
        self._is_flushing = False

    @property
    def index(self) -> RouterCache:
        return self

    def automata(self, namespace: str) -> Automata | None:
        tail = self._tails.get(namespace)
        return None if tail is None else Automata(None, -1, tail, self._serials[namespace])

    def follow(self, namespaces: str | Sequence[str]) -> None:
        """As a sink of several namespaces, as an index of one."""
        for namespace in [namespaces] if isinstance(namespaces, str) else namespaces:
            if namespace not in self._tails:
                self._tails[namespace] = LiveTail(self._vocab_size)
                self._serials[namespace] = len(self._serials)
                self._log.follow(namespace, self)

    def cut(self, seconds: float) -> None:
        """It cannot reach the store, but others can."""
        self.connection.cut(seconds)
        self._log.events.after(seconds, self._log.read_on)

    def receive(self, namespace: str, pieces: list[Piece]) -> None:
        self._tails[namespace].add(pieces)

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
            self._log.traffic.dropped_tokens += self.num_queued
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
