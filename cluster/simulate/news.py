"""What simulated routers tell gateways: the real announcer over a publisher whose messages take a hop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

from cluster.routing.announcer import Announcer
from cluster.routing.publisher import Publisher
from cluster.routing.router_news import NEWS
from cluster.simulate.events import Events

ANNOUNCE_PERIOD_S = 0.25  # as of `cluster.router.deployment`

Hear = Callable[[str, bytes, float], object]  # of a gateway: a router's name, its news, and the time


class Audience:
    """The gateways that listen to routers."""

    def __init__(self, num_gateways: int) -> None:
        """num_gateways: as many as routers say there are."""
        self.num_gateways = num_gateways
        self.hearers: list[Hear] = []
        self.num_joined = 1  # times that some have begun to listen, the start included

    def joined(self) -> None:
        """One that was gone listens again."""
        self.num_joined += 1


class SimulatedPublisher:
    """As much of `Publisher` as an announcer uses."""

    def __init__(self, name: str, events: Events, hop_s: float, audience: Audience) -> None:
        self.subscribers = Counter({NEWS: audience.num_gateways})
        self._name = name
        self._events = events
        self._hop_s = hop_s
        self._audience = audience
        self._num_met = 0

    def meet(self) -> set[bytes]:
        num_met, self._num_met = self._num_met, self._audience.num_joined
        return {NEWS} if self._num_met > num_met else set()

    def send(self, topic: bytes, data: bytes) -> None:
        self._events.after(self._hop_s, self._arrive, data)

    def _arrive(self, data: bytes) -> None:
        for hear in self._audience.hearers:
            hear(self._name, data, self._events.now)


def announcer_of(name: str, publisher: SimulatedPublisher) -> Announcer:
    return Announcer(name, cast(Publisher, publisher))
