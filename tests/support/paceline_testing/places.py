"""Gateways that lease a tenant's places, in simulated time: how many sequences run, and would at one gateway."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from cluster.simulate.tenant_leases import StoredPlaces
from cluster.tenants.lease import RENEW_S
from cluster.tenants.places import LeasedPlaces


@dataclass
class PlacesLoad:
    """Poisson arrivals of one tenant. `skew`: gateway i has a part of them that is proportional to (i + 1) ** -skew."""

    limit: int
    demand: float  # sequences that would run in the mean without a limit
    gateways: int
    skew: float = 0.0
    answer_s: float = 5.0  # of a sequence, exponentially distributed
    size: int = 1  # sequences of a request
    seconds: float = 120.0
    seed: int = 0
    dies: dict[int, float] = field(default_factory=dict)  # gateways, and when they lose all that they know
    down: tuple[float, float] = (0.0, 0.0)  # no store
    leases: bool = True
    lost: float = 0.0  # share of reports and answers; no sequence runs without a lease then


@dataclass
class PlacesUsed:
    """Of one run. Means are over time, without the first 20 s."""

    most: int = 0  # sequences at once
    most_late: int = 0  # the same after an outage of the store and its last answers, or from the start
    mean: float = 0.0
    mean_ideal: float = 0.0  # at one gateway
    calls: int = 0  # of the store
    waits: int = 0  # requests that waited for one
    requests: int = 0


_BEGIN_S = 20.0


class _Running:
    """Sequences by time."""

    def __init__(self) -> None:
        self.count = self.most = 0
        self._sum = self._at = 0.0

    def change(self, by: int, now: float) -> None:
        self._sum += self.count * max(0.0, now - max(self._at, _BEGIN_S))
        self.count, self._at = self.count + by, now
        self.most = max(self.most, self.count)

    def mean(self, now: float) -> float:
        self.change(0, now)
        return self._sum / (now - _BEGIN_S)


def places_used(
    load: PlacesLoad, check: Callable[[Counter[int], float], object] = lambda running, now: None
) -> PlacesUsed:
    """check: called after each change with the sequences of each gateway."""
    rng = random.Random(load.seed)
    store, used = StoredPlaces(), PlacesUsed()
    places = [LeasedPlaces(load.limit, load.gateways) for _ in range(load.gateways)]
    lives = Counter[int]()  # of each gateway
    running, all_running, ideal = Counter[int](), _Running(), _Running()
    weights = list(accumulate((number + 1) ** -load.skew for number in range(load.gateways)))
    order = itertools.count()
    events: list[tuple[float, int, str, int, int]] = []

    def after(now: float, kind: str, gateway: int = 0, life: int = 0) -> None:
        heapq.heappush(events, (now, next(order), kind, gateway, life))

    def renew(gateway: int, now: float) -> None:
        if not load.leases or load.down[0] <= now < load.down[1]:
            return
        used.calls += 1
        report = places[gateway].report(running[gateway], now)
        if load.lost and rng.random() < load.lost / 2:
            return  # on its way to the store
        told = store.renew(gateway + load.gateways * lives[gateway], report, now)
        if not load.lost or rng.random() >= load.lost / 2:
            places[gateway].renew(told)

    def arrive(now: float) -> None:
        used.requests += 1
        (gateway,) = rng.choices(range(load.gateways), cum_weights=weights)
        lasts = [rng.expovariate(1 / load.answer_s) for _ in range(load.size)]
        if ideal.count + load.size <= load.limit:
            ideal.change(load.size, now)
            for one in lasts:
                after(now + one, "ideal ends")
        own = places[gateway]
        if load.leases and own.should_ask(load.size, running[gateway], now):
            used.waits += 1
            own.waiting += load.size
            renew(gateway, now)
            own.waiting -= load.size
        own.ask(load.size, now)
        may_run = not load.lost or own.has_lease(now)
        if may_run and running[gateway] + load.size <= own.most(now):
            running[gateway] += load.size
            all_running.change(load.size, now)
            for one in lasts:
                after(now + one, "ends", gateway, lives[gateway])

    for gateway in range(load.gateways):
        after(rng.random() * RENEW_S, "renew", gateway)
    for gateway, at in load.dies.items():
        after(at, "dies", gateway)
    after(rng.expovariate(load.demand / load.answer_s / load.size), "arrives")
    late_from = load.down[1] + 12 * load.answer_s if load.down[1] else 0.0
    while events and events[0][0] < load.seconds:
        now, _, kind, gateway, life = heapq.heappop(events)
        if kind == "arrives":
            arrive(now)
            after(now + rng.expovariate(load.demand / load.answer_s / load.size), "arrives")
        elif kind == "renew":
            if running[gateway] or not places[gateway].is_idle(now):
                renew(gateway, now)
            after(now + RENEW_S * rng.uniform(0.8, 1.2), "renew", gateway)
        elif kind == "ideal ends":
            ideal.change(-1, now)
        elif kind == "ends" and life == lives[gateway]:
            running[gateway] -= 1
            all_running.change(-1, now)
        elif kind == "dies":
            all_running.change(-running.pop(gateway, 0), now)
            lives[gateway] += 1
            places[gateway] = LeasedPlaces(load.limit, load.gateways)
        if now >= late_from:
            used.most_late = max(used.most_late, all_running.count)
        check(running, now)
    used.most = all_running.most
    used.mean, used.mean_ideal = all_running.mean(load.seconds), ideal.mean(load.seconds)
    return used
