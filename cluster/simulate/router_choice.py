"""How a gateway's handle chooses a router: Paceline's ranks, Ray Serve's rules and its memory of queue lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence

from cluster.router.deployment import MAX_ONGOING_REQUESTS
from cluster.router.replica_choice import ready_first
from cluster.simulate.rounds import Group

_REMEMBERED_S = 10.0  # RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S


class Readiness:
    """What gateways know of it, which is a little old."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}  # those that Serve lists
        self.ready: set[str] = set()

    def is_ready(self, group: Group) -> bool:
        return group.name in self.ready


class RouterChoice:
    """Serve's router of ray 2.5x: it takes the shortest queue that it remembers; others it probes behind the request,
    and waits for them only where it remembers none that has room."""

    def __init__(self, readiness: Readiness, seed: int) -> None:
        self.num_probes = 0
        self._readiness = readiness
        self._random = random.Random(seed)
        self._known: dict[str, tuple[int, float]] = {}  # queue length, and when it was told

    def choose(self, now: float) -> Group | None:
        """None: there is no router with room."""
        candidates: Sequence[Group] = list(self._readiness.groups.values())
        for rank in ready_first(candidates, self._readiness.is_ready, sample=self._random.sample):
            if (chosen := self._shortest(rank, now)) is not None:
                length, _ = self._known[chosen.name]
                self._known[chosen.name] = length + 1, now
                return chosen
        return None

    def _shortest(self, rank: Sequence[Group], now: float) -> Group | None:
        known, oldest = self._known, now - _REMEMBERED_S
        shortest, chosen, unknown = MAX_ONGOING_REQUESTS, None, []
        for group in rank:
            length, told_at = known.get(group.name, (MAX_ONGOING_REQUESTS, oldest))
            if length >= MAX_ONGOING_REQUESTS or told_at <= oldest:
                unknown.append(group)
            elif length < shortest:
                shortest, chosen = length, group
        if unknown:
            self.num_probes += len(unknown)
            for group in unknown:
                known[group.name] = group.num_open, now
            if chosen is None:
                chosen = min(unknown, key=lambda group: known[group.name][0])
                if known[chosen.name][0] >= MAX_ONGOING_REQUESTS:
                    return None
        return chosen

    def accepted(self, group: Group, now: float) -> None:
        """Routers tell the length of their queue when they take a request."""
        self._known[group.name] = group.num_open, now

    def ended(self, group: Group) -> None:
        if (told := self._known.get(group.name)) is not None:
            self._known[group.name] = max(0, told[0] - 1), told[1]
