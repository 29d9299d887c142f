"""The shared cache in simulated time: one log in the store, and each router's index of what it follows.

Automata, reads and the plan of a fold are the real ones. Publishers, followers and compactors are threads around the
network in production; here they are events with the same periods. Counts of the drafter soft_ngram are not exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from cache_service.automata.automata_index import Automata
from cache_service.automata.live_tail import LiveTail
from cache_service.formats.documents import Piece
from cache_service.formats.earnings import Earnings
from cache_service.log.compactor import CompactorSettings
from cache_service.log.follower import FollowerSettings
from cache_service.log.publisher import PublisherSettings
from cluster.simulate.events import Events
from cluster.simulate.followed import Followed
from cluster.simulate.options import CostOptions
from cluster.simulate.store_traffic import StoreMeter


class Follower(Protocol):
    def receive(self, namespace: str, pieces: list[Piece]) -> None: ...


class SharedLog:
    """The store, with a compactor for each namespace that is written to."""

    def __init__(self, events: Events, costs: CostOptions) -> None:
        self.events = events
        self.meter = StoreMeter()
        self.is_there = True
        self._delay_s = costs.store_s
        self._entries: dict[str, list[Piece]] = {}
        self._followers: dict[str, list[Follower]] = {}
        self._late: list[tuple[str, Follower]] = []  # that have yet to read what there is
        events.every(CompactorSettings().fold_every_s, self._fold)

    def write(self, namespace: str, pieces: list[Piece]) -> None:
        self._entries.setdefault(namespace, []).extend(pieces)
        self.meter.write(namespace, sum(len(piece.token_ids) for piece in pieces))
        for follower in self._followers.get(namespace, ()):
            self.events.after(self._delay_s + FollowerSettings().poll_s / 2, follower.receive, namespace, pieces)

    def follow(self, namespace: str, follower: Follower) -> None:
        self._followers.setdefault(namespace, []).append(follower)
        self.meter.follow(namespace)
        if self.is_there:
            self._read(namespace, follower)
        else:
            self._late.append((namespace, follower))

    def leave(self, namespace: str, follower: Follower) -> None:
        self._followers[namespace].remove(follower)
        self.meter.leave(namespace)

    def lose(self) -> None:
        """The store is away: nothing is written, read or folded. What it holds stays."""
        self.is_there = False

    def bring(self) -> None:
        self.is_there = True
        late, self._late = self._late, []
        for namespace, follower in late:
            if follower in self._followers[namespace]:
                self._read(namespace, follower)

    def _read(self, namespace: str, follower: Follower) -> None:
        self.meter.read(namespace)
        if entries := self._entries.get(namespace):
            self.events.after(self._delay_s, follower.receive, namespace, list(entries))

    def _fold(self) -> None:
        if self.is_there:
            self.meter.fold()


class RouterCache:
    """One router's side: a `cluster.router.guarded_sink.TokenSink` and the `AutomataIndex` of its drafter."""

    def __init__(self, log: SharedLog, vocab_size: int, most_namespaces: int) -> None:
        self.num_queued = 0  # tokens that wait to be written
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
        if self._log.is_there:
            for namespace, pieces in self._queued.items():
                self._log.write(namespace, pieces)
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
