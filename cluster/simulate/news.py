"""What simulated routers tell gateways: the real announcer over a publisher whose messages take a hop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from cluster.routing.announcer import Announcer
from cluster.routing.publisher import Publisher
from cluster.routing.router_news import NEWS, WHOLE
from cluster.simulate.events import Events

ANNOUNCE_PERIOD_S = 0.25  # as of `cluster.router.deployment`

Hear = Callable[[str, bytes, float], object]  # of a gateway: a router's name, its news, and the time


class Audience:
    """The gateways that listen to routers."""

    def __init__(self, num_gateways: int) -> None:
        """num_gateways: as many as routers say there are."""
        self.num_gateways = num_gateways
        self.hearers: list[Hear] = []
        self.joined: list[Hear] = []  # each time that one begins to listen

    def add(self, hear: Hear) -> None:
        self.hearers.append(hear)
        self.joined.append(hear)


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
        first, self._num_met = self._num_met, len(self._audience.joined)
        return {_topic_of(number) for number in range(first, self._num_met)}

    def send(self, topic: bytes, data: bytes) -> None:
        is_news = topic == NEWS
        hearers = self._audience.hearers if is_news else [self._audience.joined[int(topic.removeprefix(WHOLE))]]
        self._events.after(self._hop_s, self._arrive, hearers, data)

    def _arrive(self, hearers: Sequence[Hear], data: bytes) -> None:
        for hear in hearers:
            hear(self._name, data, self._events.now)


def _topic_of(number: int) -> bytes:
    """number: of those that have joined."""
    return WHOLE + str(number).encode()


def announcer_of(name: str, publisher: SimulatedPublisher) -> Announcer:
    return Announcer(name, cast(Publisher, publisher))
