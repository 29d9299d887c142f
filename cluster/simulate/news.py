"""What simulated routers tell gateways: the real announcer over a publisher whose messages take a hop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from cluster.routing.announcer import Announcer
from cluster.routing.publisher import Publisher
from cluster.routing.router_news import NEWS
from cluster.simulate.events import Events

ANNOUNCE_PERIOD_S = 0.25  # as of `cluster.router.deployment`

Hear = Callable[[bytes, float], object]  # of a gateway: news, and the time


class SimulatedPublisher:
    """As much of `Publisher` as an announcer uses; all gateways listen from the start."""

    def __init__(self, events: Events, hop_s: float, num_gateways: int, hearers: Sequence[Hear]) -> None:
        self.subscribers = Counter({NEWS: num_gateways})
        self._events = events
        self._hop_s = hop_s
        self._hearers = hearers
        self._is_new = True

    def meet(self) -> set[bytes]:
        is_new, self._is_new = self._is_new, False
        return {NEWS} if is_new else set()

    def send(self, topic: bytes, data: bytes) -> None:
        self._events.after(self._hop_s, self._arrive, data)

    def _arrive(self, data: bytes) -> None:
        for hear in self._hearers:
            hear(data, self._events.now)


def announcer_of(name: str, publisher: SimulatedPublisher) -> Announcer:
    return Announcer(name, cast(Publisher, publisher))
