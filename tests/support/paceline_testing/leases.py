"""Gateways that lease a tenant's limit from one bucket, in simulated time: what they admit, and one gateway would."""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import dataclass, field
from itertools import accumulate

from cluster.simulate.tenant_leases import StoredBucket
from cluster.tenants.lease import RENEW_S, LeasedBucket
from cluster.tenants.token_bucket import TokenBucket


@dataclass
class Load:
    """Poisson arrivals of one tenant. `skew`: gateway i has a part of them that is proportional to (i + 1) ** -skew."""

    rate: float  # limit, amount a second
    burst: float
    demand: float  # amount a second
    size: float  # of a request, in the mean; exponential if it is not 1
    gateways: int
    skew: float = 0.0
    minutes: int = 4
    seed: int = 0
    dies: dict[int, float] = field(default_factory=dict)  # gateways and when they lose all that they know
    down: tuple[float, float] = (0.0, 0.0)  # no store
    leases: bool = True


def admitted(load: Load) -> tuple[list[float], list[float], list[float]]:
    """By minute: what the gateways admit, what one bucket for all would admit, and what was asked for."""
    rng = random.Random(load.seed)
    fresh = lambda now: LeasedBucket(load.rate, load.burst, load.gateways, now, rng.random)  # noqa: E731
    buckets = [fresh(0.0) for _ in range(load.gateways)]
    ideal = TokenBucket(load.rate, buckets[0].capacity, 0.0)
    store, reports = StoredBucket(), [(rng.random() * RENEW_S, gateway) for gateway in range(load.gateways)]
    heapq.heapify(reports)
    weights = list(accumulate((number + 1) ** -load.skew for number in range(load.gateways)))
    sums = [[0.0] * load.minutes for _ in range(3)]
    dies, arrival = sorted((at, gateway) for gateway, at in load.dies.items()), 0.0

    def renew(bucket: LeasedBucket, now: float) -> None:
        if load.leases and not load.down[0] <= now < load.down[1]:
            bucket.renew(store.renew(bucket.report(now), now), now)

    while True:
        arrival += rng.expovariate(load.demand / load.size)
        while reports[0][0] <= arrival:
            now, gateway = reports[0]
            while dies and dies[0][0] <= now:
                buckets[dies.pop(0)[1]] = fresh(now)
            if not buckets[gateway].is_idle:
                renew(buckets[gateway], now)
            heapq.heapreplace(reports, (now + RENEW_S * rng.uniform(0.8, 1.2), gateway))
        if arrival >= load.minutes * 60.0:
            return sums[0], sums[1], sums[2]
        minute = int(arrival / 60.0)
        amount = 1.0 if load.size == 1 else float(max(1, round(rng.expovariate(1 / load.size))))
        sums[2][minute] += amount
        if ideal.wait_s(amount, arrival) == 0:
            ideal.take(amount, arrival)
            sums[1][minute] += amount
        (bucket,) = rng.choices(buckets, cum_weights=weights)
        if not bucket.has_lease(arrival):
            renew(bucket, arrival)
        bucket.ask(amount)
        if bucket.wait_s(amount, arrival) == 0:
            bucket.take(amount, arrival)
            sums[0][minute] += amount


def fresh_bucket(rate: float, burst: float, gateways: int) -> tuple[LeasedBucket, StoredBucket]:
    return LeasedBucket(rate, burst, gateways, time.monotonic()), StoredBucket()
