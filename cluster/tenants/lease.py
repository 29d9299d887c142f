"""How much of a tenant's limit a gateway may spend until its next lease. No clock, no I/O.

A limit has one bucket for the whole cluster, in Redis. A few times a second each gateway reports its spending and its
demand. The answer, a lease, has the bucket's level and the demand on all gateways. Until the next lease the gateway may
spend a part of the level in proportion to its share of the demand. What it does not spend stays in the bucket, and what
gateways spend beyond the level is a debt that reduces later leases, so the mean total is right whatever the age of
leases. A gateway without a lease enforces an equal share of the limit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.tenants.token_bucket import TokenBucket

RENEW_S = 0.25  # between two reports of a gateway
LIFE_S = 2.0  # of a lease
CALL_LIMIT_S = LIFE_S / 4  # that the server may take for an answer
MEMORY_S = 2.0  # time constant by which demand is forgotten
_LEAST_BURST_S = 3.0  # the bucket has room for the inflow between two reports, which would otherwise be lost
_LEAST_BURST = 5.0  # and for that of some requests: gateways leave one more in it than a single one would


@dataclass(frozen=True, slots=True)
class Report:
    """A gateway's report on one limit. Amounts are requests or tokens."""

    rate: float  # of the whole limit, a second
    capacity: float
    spent: float  # since the last report
    asked: float  # the same, with what was refused
    level: float  # of the bucket if there is none: as far as this gateway knows


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to a report."""

    level: float  # of the cluster's bucket; below zero after overdrafts
    asked: float  # by all gateways, as `remembered` sums it up


Reports = Mapping[str, Mapping[str, Report]]
"""By tenant and limit."""

Answers = dict[str, dict[str, Told]]
"""By tenant and limit."""


def remembered(asked: float, passed_s: float) -> float:
    """A sum of demand after some time without any."""
    return asked * math.exp(-passed_s / MEMORY_S)


def part_of(own: float, others: float) -> float:
    """The part of the level that a gateway may spend. own, others: demand in the time of a lease.

    Others count twice: what they spend is known here a lease later, and a part that is too large would make all
    gateways spend too much and too little in turns."""
    return own / (own + 2.0 * others) if own > 0 else 0.0


class LeasedBucket:
    """A bucket that all gateways of a cluster share, as one of them sees it. Behaves as `TokenBucket` where there is
    one gateway, and by its equal share without a lease."""

    __slots__ = (
        "_asked", "_draw", "_draws", "_in_flight", "_is_leased", "_num_holders", "_own", "_share", "_spent", "_told",
        "_told_at", "capacity", "rate",
    )  # fmt: skip

    def __init__(
        self, rate: float, burst: float, num_holders: int, now: float, draws: Callable[[], float] = random.random
    ) -> None:
        """rate: of the whole limit, amount a second, above 0. burst: capacity, of which each of `num_holders` gateways
        has its share without a lease, at least 1 in any case."""
        self._num_holders = num_holders
        self._draws = draws
        self._share = TokenBucket(rate / num_holders, max(1.0, burst / num_holders), now)
        self._is_leased = False
        self._told_at = -math.inf  # never
        self._draw = 1.0
        self._own = self._spent = self._asked = 0.0
        self._in_flight = (0.0, 0.0)
        self.change(rate, burst, now)
        self._told = Told(self.capacity, 0.0)

    def change(self, rate: float, burst: float, now: float) -> None:
        """Change rate and capacity; the level stays, up to the new capacity."""
        self.rate = rate
        self.capacity = max(_LEAST_BURST, burst, _LEAST_BURST_S * rate)
        self._share.change(rate / self._num_holders, max(1.0, burst / self._num_holders), now)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until this amount is available, as far as is known; 0: now. An amount above the capacity waits for a
        full bucket, and with a lease one above half of it for a half full one: others may always ask, too."""
        if not self.has_lease(now):
            return self._share.wait_s(amount, now)
        amount = min(amount, self.capacity / 2.0)
        wanted, window = self._spent + amount, RENEW_S / MEMORY_S
        part = part_of(max(self._own * window, wanted), max(0.0, self._told.asked - self._own) * window)
        # A part of a level is seldom a whole number of requests. With a threshold that is drawn for each lease it is,
        # in the mean; a gateway that is alone waits for all of the amount.
        wanted -= (1.0 - self._draw) * (1.0 - part) * amount
        level = self._level(now)
        if wanted <= level * part:
            return 0.0
        return max(RENEW_S, (min(self.capacity, wanted / part) - level) / self.rate)

    def take(self, amount: float, now: float) -> None:
        """Take the amount even if the level is lower."""
        if not self.has_lease(now):
            self._share.take(amount, now)
        self._spent += amount

    def ask(self, amount: float) -> None:
        """Note demand, whether or not it is met."""
        self._asked += amount

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to report."""
        return not self._spent and not self._asked

    def has_lease(self, now: float) -> bool:
        """A lease that is not renewed ends. Then this gateway's share of the limit begins with its share of the last
        level."""
        if self._is_leased and now - self._told_at > LIFE_S:
            self._is_leased = False
            self._share.set_level(self._told.level / self._num_holders - self._spent, self._told_at)
        return self._is_leased

    def report(self, now: float) -> Report:
        """At most one report may be in flight. A report without an answer has no effect."""
        self._in_flight = self._spent, self._asked
        spent = self._spent
        if not self.has_lease(now):  # inflow that the full bucket could not take is not a debt
            spent = min(spent, max(0.0, self._share.capacity - self._share.level(now)))
        return Report(self.rate, self.capacity, spent=spent, asked=self._asked, level=self._level(now))

    def _level(self, now: float) -> float:
        """The level of the cluster's bucket, assuming that nothing was taken since the last lease. A gateway with few
        requests has an old lease: by its level, it would refuse the first request after each pause."""
        return min(self.capacity, self._told.level + (now - self._told_at) * self.rate)

    def renew(self, told: Told, now: float) -> None:
        """Take the answer to the last report."""
        spent, asked = self._in_flight
        self._spent -= spent
        self._asked -= asked
        self._own = remembered(self._own, now - self._told_at) + asked
        self._told, self._told_at, self._is_leased = told, now, True
        self._draw = self._draws()
