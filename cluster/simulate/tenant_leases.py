"""Limits of tenants over several simulated gateways: reports and leases are the real ones, the store is arithmetic."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from cache_service.store.circuit_breaker import CircuitBreaker
from cluster.simulate.events import Events
from cluster.tenants.lease import CALL_LIMIT_S, LIFE_S, RENEW_S, Answers, Report, Reports, Told, remembered
from cluster.tenants.limiter import TenantLimiter
from cluster.tenants.places import PLACES_LIFE_S, PlacesAnswers, PlacesReport, PlacesReports, PlacesTold
from cluster.tenants.registry import TenantLimits
from cluster.tenants.renewal import FIRST_WAIT_S, JITTER

Admit = Callable[[TenantLimiter], object]


class StoredBucket:
    """The script's arithmetic: see `cache_service.store.scripts.RENEW_LEASES`."""

    def __init__(self) -> None:
        self._told: Told | None = None
        self._at = 0.0

    def renew(self, report: Report, now: float) -> Told:
        before = self._told or Told(report.level, 0.0)
        passed = now - self._at if self._told else 0.0
        level = min(report.capacity, before.level + report.rate * passed) - report.spent
        self._told, self._at = Told(level, remembered(before.asked, passed) + report.asked), now
        return self._told


class StoredPlaces:
    """The script's arithmetic: see `cache_service.store.scripts.RENEW_PLACES`."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, float]] = {}  # by gateway: places, and when they expire
        self._asked = self._at = 0.0

    def renew(self, gateway: int, report: PlacesReport, now: float) -> PlacesTold:
        self._held = {one: held for one, held in self._held.items() if now < held[1]}
        others = sum(count for one, (count, _) in self._held.items() if one != gateway)
        held = max(report.kept, min(report.wanted, report.limit - others))
        self._asked, self._at = remembered(self._asked, max(0.0, now - self._at)) + report.asked, now
        self._held.pop(gateway, None)
        if held:
            self._held[gateway] = held, now + PLACES_LIFE_S
        return PlacesTold(held, max(0, report.limit - others - held), self._asked)


class StoredLimits:
    """The store's buckets and places of all tenants."""

    def __init__(self) -> None:
        self.num_holders = 0  # gateways so far; one that comes back is another one
        self._buckets: defaultdict[tuple[str, str], StoredBucket] = defaultdict(StoredBucket)
        self._places: defaultdict[str, StoredPlaces] = defaultdict(StoredPlaces)

    def renew(self, reports: Reports, now: float) -> Answers:
        return {
            tenant: {limit: self._buckets[tenant, limit].renew(report, now) for limit, report in own.items()}
            for tenant, own in reports.items()
        }

    def renew_places(self, holder: int, reports: PlacesReports, now: float) -> PlacesAnswers:
        return {tenant: self._places[tenant].renew(holder, report, now) for tenant, report in reports.items()}


class _Waiter:
    """A request that waits for the first lease of its tenant or for a place, but not for long."""

    def __init__(self, admit: Admit, limiter: TenantLimiter, num_places: int) -> None:
        self._admit: Admit | None = admit
        self._limiter = limiter
        self._places = limiter.waiting_for_places(num_places)
        self._places.__enter__()

    def go_on(self) -> None:
        admit, self._admit = self._admit, None
        if admit is not None:
            self._places.__exit__(None, None, None)
            admit(self._limiter)


class GatewayLimiters:
    """The limiters of one gateway, with leases that are renewed as `LeaseRenewal` does."""

    def __init__(
        self,
        events: Events,
        limits: TenantLimits,
        num_gateways: int,
        stored: StoredLimits | None,
        *,
        store_s: float,
        reaches_store: Callable[[], bool],
        seed: int,
    ) -> None:
        """stored: None: this gateway enforces its share. store_s: of a call to the store."""
        self._events = events
        self._limits = limits
        self._has_limits = limits != TenantLimits()
        self._num_gateways = num_gateways
        self._stored = stored
        self._store_s = store_s
        self._reaches_store = reaches_store
        self._random = random.Random(seed)
        self._limiters: dict[int, TenantLimiter] = {}
        self._active: dict[str, TenantLimiter] = {}
        self._without_lease: set[str] = set()
        self._waiters: list[_Waiter] = []
        self._breaker = CircuitBreaker(max_failures=1, max_pause_s=LIFE_S)
        self._is_calling = self._is_renewing = self._is_closed = False
        if stored is not None:
            stored.num_holders += 1
            self._holder = stored.num_holders

    def of(self, tenant: int) -> TenantLimiter:
        key = tenant if self._has_limits else 0  # without limits, tenants need no limiters of their own
        if (known := self._limiters.get(key)) is None:
            known = TenantLimiter(
                self._limits, self._num_gateways, clock=lambda: self._events.now, draws=self._random.random
            )
            self._limiters[key] = known
        return known

    def enter(self, tenant: int, admit: Admit) -> None:
        """Call `admit` with the tenant's limiter, once it has leases of rates, or soon without them."""
        limiter = self.of(tenant)
        if self._stored is None:
            admit(limiter)
            return
        name = str(tenant)
        self._active[name] = limiter
        if not self._is_renewing:
            self._is_renewing = True
            self._renew_later()
        if not limiter.awaits_lease:
            admit(limiter)
            return
        self._without_lease.add(name)
        if self._breaker.is_open:
            admit(limiter)
        else:
            self._await(_Waiter(admit, limiter, 0))

    def await_place(self, tenant: int, admit: Admit) -> None:
        """Call `admit`, once there is a place if this gateway has none and may get one, or soon without it."""
        limiter = self.of(tenant)
        if self._stored is None or self._breaker.is_open or not limiter.should_ask_for_places(1):
            admit(limiter)
            return
        name = str(tenant)
        self._active[name] = limiter
        self._without_lease.add(name)
        self._await(_Waiter(admit, limiter, 1))

    def _await(self, waiter: _Waiter) -> None:
        self._waiters.append(waiter)
        self._events.after(FIRST_WAIT_S, waiter.go_on)
        self._call(is_due=False)

    def close(self) -> None:
        """The gateway is gone."""
        self._is_closed = True

    def _renew_later(self) -> None:
        self._events.after(RENEW_S * self._random.uniform(1 - JITTER, 1 + JITTER), self._renew)

    def _renew(self) -> None:
        if not self._is_closed:
            self._renew_later()
            self._call(is_due=True)

    def _call(self, is_due: bool) -> None:
        """One at a time. is_due: for all tenants with traffic; otherwise for those without a lease."""
        now = self._events.now
        if self._is_calling or self._is_closed or self._stored is None or self._breaker.wait_s(now):
            return
        without_lease, self._without_lease = self._without_lease, set()
        waiters, self._waiters = self._waiters, []
        limiters = self._active if is_due else {name: self._active[name] for name in sorted(without_lease)}
        if is_due:
            self._active = {name: limiter for name, limiter in limiters.items() if not limiter.is_idle}
        reports = {name: own for name in limiters if (own := limiters[name].reports(name in without_lease))}
        self._is_calling = True
        if not reports:
            self._call_for_places(limiters, waiters)
        elif self._reaches_store():
            answers = self._stored.renew(reports, now + self._store_s / 2)
            self._events.after(self._store_s, self._answered, limiters, answers, waiters)
        else:
            self._events.after(CALL_LIMIT_S, self._failed, waiters)

    def _answered(self, limiters: Mapping[str, TenantLimiter], answers: Answers, waiters: list[_Waiter]) -> None:
        for name, told in answers.items():
            limiters[name].renew(told)
        self._breaker.succeeded()
        self._call_for_places(limiters, waiters)

    def _call_for_places(self, limiters: Mapping[str, TenantLimiter], waiters: list[_Waiter]) -> None:
        assert self._stored is not None
        reports = {name: one for name in limiters if (one := limiters[name].places_report()) is not None}
        if not reports or self._is_closed:
            self._called(waiters)
        elif self._reaches_store():
            answers = self._stored.renew_places(self._holder, reports, self._events.now + self._store_s / 2)
            self._events.after(self._store_s, self._have_places, limiters, answers, waiters)
        else:
            self._events.after(CALL_LIMIT_S, self._failed, waiters)

    def _have_places(
        self, limiters: Mapping[str, TenantLimiter], answers: PlacesAnswers, waiters: list[_Waiter]
    ) -> None:
        for name, told in answers.items():
            limiters[name].renew_places(told)
        self._breaker.succeeded()
        self._called(waiters)

    def _failed(self, waiters: list[_Waiter]) -> None:
        self._breaker.failed(self._events.now)
        self._called(waiters)

    def _called(self, waiters: Iterable[_Waiter]) -> None:
        self._is_calling = False
        for waiter in waiters:
            waiter.go_on()
        if self._without_lease:
            self._call(is_due=False)
