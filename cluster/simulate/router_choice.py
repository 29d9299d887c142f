"""How a gateway's handle chooses a router, as `cluster.routing.policy.SoonestFirst`: by news of load and prefix cache,
with Ray Serve's rules and its memory of queue lengths."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from actors.messages import GenerationRequest
from cluster.router.deployment import MAX_ONGOING_REQUESTS
from cluster.routing.heard_routers import HeardRouters
from cluster.routing.known_routers import KnownRouters, RoutedPrompt
from cluster.routing.replica_choice import soonest_first
from cluster.routing.router_news import decode_news
from cluster.simulate.rounds import Group

_REMEMBERED_S = 10.0  # RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S


class Readiness:
    """What gateways know of it, which is a little old."""

    def __init__(self) -> None:
        self.groups: list[Group] = []  # those that Serve lists
        self.ready: dict[str, Group] = {}  # by name


class QueueLengths:
    """Those that were told within the last ten seconds."""

    def __init__(self) -> None:
        self.known: dict[Group, int] = {}
        self._told_at: dict[Group, float] = {}
        self._told: deque[tuple[float, Group]] = deque()

    def tell(self, group: Group, length: int, now: float) -> None:
        self.known[group] = length
        self._told_at[group] = now
        self._told.append((now, group))

    def forget_old(self, now: float) -> None:
        while self._told and self._told[0][0] <= now - _REMEMBERED_S:
            told_at, group = self._told.popleft()
            if self._told_at.get(group) == told_at:
                del self.known[group], self._told_at[group]


class RouterChoice:
    """It takes the shortest queue that it remembers; others it probes behind the request, and waits for them only where
    it remembers none that has room."""

    def __init__(self, readiness: Readiness, seed: int, heard: HeardRouters | None = None) -> None:
        """heard: what routers say, where all gateways share it."""
        self.num_probes = 0
        self._readiness = readiness
        self._lengths = QueueLengths()
        self._known = KnownRouters(random.Random(seed), heard)

    def hear(self, news: bytes, now: float) -> None:
        self._known.hear(decode_news(news), now)

    @property
    def has_others(self) -> bool:
        """Whether several routers are ready."""
        return len(self._readiness.ready) > 1

    def choose(self, request: GenerationRequest, prompt: RoutedPrompt, now: float) -> Group | None:
        """None: there is no router with room. prompt: the request's."""
        self._lengths.forget_old(now)
        ready = self._readiness.ready
        for rank in soonest_first(self._known, ready, request, prompt, now):
            if (chosen := self._taken(rank, now)) is not None:
                return chosen
        return self._taken([group for group in self._readiness.groups if group.name not in ready], now)

    def _taken(self, rank: Sequence[Group], now: float) -> Group | None:
        chosen = self._shortest(rank, now) if rank else None
        if chosen is not None:
            self._lengths.tell(chosen, self._lengths.known[chosen] + 1, now)
        return chosen

    def _shortest(self, rank: Sequence[Group], now: float) -> Group | None:
        known, full = self._lengths.known, MAX_ONGOING_REQUESTS
        lengths = [known.get(group, full) for group in rank]
        shortest = min(lengths)
        if max(lengths) >= full:
            unknown = [group for group, length in zip(rank, lengths, strict=True) if length >= full]
            self.num_probes += len(unknown)
            for group in unknown:
                self._lengths.tell(group, group.num_open, now)
            if shortest >= full:
                lengths = [known[group] for group in rank]
                shortest = min(lengths)
        return rank[lengths.index(shortest)] if shortest < full else None

    def accepted(self, group: Group, now: float) -> None:
        """Routers tell the length of their queue when they take a request."""
        self._lengths.tell(group, group.num_open, now)

    def ended(self, group: Group, now: float) -> None:
        if (length := self._lengths.known.get(group)) is not None:
            self._lengths.tell(group, max(0, length - 1), now)
