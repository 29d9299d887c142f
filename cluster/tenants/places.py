"""How many of a tenant's sequences may run at a gateway until its next lease. No clock, no I/O.

`max_concurrent` is a number of places, which Redis gives to gateways and gets back. A gateway holds a place for each
sequence that runs there, and a few more for those that come next, in proportion to its share of the demand. Half of the
free places stay in Redis: a gateway that has none left asks for more, and waits for the answer. All gateways together
never hold more places than there are. A gateway without a lease enforces an equal share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.tenants.lease import LIFE_S, MEMORY_S, remembered

PLACES_LIFE_S = 10.0  # of a silent gateway's places: longer than its lease, since its sequences may still run
_ASK_AGAIN_S = 0.1  # between two questions while Redis has too few places


@dataclass(frozen=True, slots=True)
class PlacesReport:
    """A gateway's report on its places."""

    limit: int  # of all gateways together
    kept: int  # those that the gateway does not give back
    wanted: int  # those that it would hold, at least `kept`
    asked: float  # sequences that have come since the last report, with those that were refused


@dataclass(frozen=True, slots=True)
class PlacesTold:
    """The answer to a report."""

    held: int  # by the gateway from now on, at least what it has kept
    left: int  # that nobody holds
    asked: float  # by all gateways, as `remembered` sums it up


PlacesReports = Mapping[str, PlacesReport]
"""By tenant."""

PlacesAnswers = dict[str, PlacesTold]
"""By tenant."""


class LeasedPlaces:
    """A tenant's places, as one gateway sees them. It gives places back before it reports that it does, so that no
    sequence can take one of them in the meantime."""

    __slots__ = (
        "_asked", "_asked_at", "_held", "_in_flight", "_leased_at", "_left", "_num_holders", "_others", "_own",
        "_own_at", "_reported_at", "_room", "limit", "waiting",
    )  # fmt: skip

    def __init__(self, limit: int, num_holders: int) -> None:
        """num_holders: gateways, of which each has an equal share without a lease, rounded up."""
        self.limit = limit
        self.waiting = 0  # sequences that wait for the answer to a report
        self._num_holders = num_holders
        self._held = self._left = self._room = 0
        self._asked = self._own = self._others = self._in_flight = 0.0
        self._leased_at = self._reported_at = self._asked_at = self._own_at = -math.inf  # never

    def has_lease(self, now: float) -> bool:
        return now - self._leased_at <= LIFE_S

    def is_idle(self, now: float) -> bool:
        """Whether there is nothing to report while no sequence runs."""
        return not self.waiting and not self._asked and not (self._held and self.has_lease(now))

    def most(self, now: float) -> int:
        """Sequences that may run here now."""
        if self.has_lease(now):
            return min(self.limit, self._held)
        return self.share

    @property
    def share(self) -> int:
        """Sequences that may run here without a lease."""
        return math.ceil(self.limit / self._num_holders)

    def ask(self, count: int, now: float) -> None:
        """Note demand, whether or not it is met."""
        self._asked += count
        self._asked_at = now

    def should_ask(self, count: int, running: int, now: float) -> bool:
        """Whether so many more sequences have no places here, and a report might get them."""
        if count > self.limit:
            return False
        if not self.has_lease(now):
            return True
        missing = running + count - self._held
        return missing > 0 and (missing <= self._left or now - self._leased_at > _ASK_AGAIN_S)

    def report(self, running: int, now: float) -> PlacesReport:
        """At most one report may be in flight."""
        self._in_flight, self._reported_at = self._asked, now
        spare = self._spare(running, now)
        if not self.has_lease(now):
            self._held = 0
        self._held = max(running, min(self._held, running + spare))
        wanted = max(self._held, min(self.limit, running + max(spare, self.waiting)))
        return PlacesReport(self.limit, kept=self._held, wanted=wanted, asked=self._asked)

    def _spare(self, running: int, now: float) -> int:
        """Places to hold for sequences to come: none if none has come lately."""
        if now - self._asked_at > MEMORY_S:
            return 0
        passed_s = now - self._own_at
        own = remembered(self._own, passed_s) + self._asked
        others = remembered(self._others, passed_s)
        return int(own / (own + others) * max(0, min(self.limit, self._room) - running) / 2) if own else 0

    def renew(self, told: PlacesTold) -> None:
        """Take the answer to the last report. The lease counts from the report, so that it ends before Redis gives the
        places to others."""
        if self._reported_at == -math.inf:
            return  # it is for the places that these have replaced
        self._asked -= self._in_flight
        self._own = remembered(self._own, self._reported_at - self._own_at) + self._in_flight
        self._others = max(0.0, told.asked - self._own)
        self._held, self._left, self._room = told.held, told.left, told.held + told.left
        self._own_at = self._leased_at = self._reported_at
