"""Renews the leases of a gateway in the background: a few times a second one call for the rates and one for the places
of all tenants with traffic."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol

from cache_service.store.circuit_breaker import CircuitBreaker
from cluster.tenants.lease import LIFE_S, RENEW_S, Answers, Reports
from cluster.tenants.limiter import TenantLimiter
from cluster.tenants.places import PlacesAnswers, PlacesReports

logger = logging.getLogger(__name__)

JITTER = 0.2  # of the time between two calls, so that no gateway always comes right after the same other one
FIRST_WAIT_S = 0.05  # that a call waits for the first lease of its tenant, or for a place


class Leases(Protocol):
    def renew(self, reports: Reports) -> Answers:
        """Raises StoreError."""


class Places(Protocol):
    def renew(self, reports: PlacesReports) -> PlacesAnswers:
        """Raises StoreError."""


class LeaseRenewal:
    """For the limiters of one gateway. Without a store that answers, they go by their shares."""

    def __init__(self, leases: Leases, places: Places) -> None:
        self._leases = leases
        self._places = places
        self._active: dict[str, TenantLimiter] = {}  # by tenant
        self._waiting = set[str]()  # tenants without a lease
        self._wanted = asyncio.Event()
        self._renewed = asyncio.Event()  # replaced with each renewal
        self._breaker = CircuitBreaker(max_failures=1, max_pause_s=LIFE_S)
        self._caller = ThreadPoolExecutor(1, "tenant-leases")

    def use(self, tenant_id: str, limiter: TenantLimiter) -> None:
        """Renew the leases of a tenant from now on, as long as it has traffic, and at once if there are none."""
        self._active[tenant_id] = limiter
        if limiter.awaits_lease:
            self._waiting.add(tenant_id)
            self._wanted.set()

    async def first_lease(self, limiter: TenantLimiter) -> None:
        """Wait for a moment for the lease of a tenant that has not been here lately: its share might be far too much,
        or too little."""
        if limiter.awaits_lease and not self._breaker.is_open:
            await self._next_renewal()

    async def places(self, tenant_id: str, limiter: TenantLimiter, count: int) -> None:
        """Wait for a moment for the places of so many sequences, if there are too few here and others may be had."""
        if self._breaker.is_open or not limiter.should_ask_for_places(count):
            return
        self._active[tenant_id] = limiter
        self._waiting.add(tenant_id)
        self._wanted.set()
        with limiter.waiting_for_places(count):
            await self._next_renewal()

    async def _next_renewal(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._renewed.wait(), FIRST_WAIT_S)

    async def run(self) -> None:
        """Renew forever."""
        try:
            await self._keep_renewing()
        finally:
            self._caller.shutdown(wait=False)

    async def _keep_renewing(self) -> None:
        due = time.monotonic()
        while True:
            is_due = time.monotonic() >= due
            if is_due:
                due = time.monotonic() + RENEW_S * random.uniform(1 - JITTER, 1 + JITTER)
            await self._renew(is_due)
            pause_s = self._breaker.wait_s(time.monotonic())
            if pause_s:
                await asyncio.sleep(pause_s)
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), max(0.0, due - time.monotonic()))

    async def _renew(self, is_due: bool = True) -> None:
        """is_due: the leases of all active tenants; otherwise of those that have none, which may come at any rate."""
        self._wanted.clear()
        renewed, self._renewed = self._renewed, asyncio.Event()
        waiting, self._waiting = self._waiting, set()
        limiters = self._active if is_due else {tenant: self._active[tenant] for tenant in waiting}
        if is_due:
            self._active = {tenant: limiter for tenant, limiter in limiters.items() if not limiter.is_idle}
        call = partial(asyncio.get_running_loop().run_in_executor, self._caller)
        reports = {tenant: own for tenant in limiters if (own := limiters[tenant].reports(tenant in waiting))}
        try:
            if reports:
                for tenant, told in (await call(self._leases.renew, reports)).items():
                    limiters[tenant].renew(told)
            places = {tenant: report for tenant in limiters if (report := limiters[tenant].places_report())}
            if places:
                for tenant, held in (await call(self._places.renew, places)).items():
                    limiters[tenant].renew_places(held)
        except Exception as error:  # a StoreError, or an answer that makes no sense: the renewals must go on
            if not self._breaker.is_open:
                logger.warning("limits of tenants are enforced by equal shares for now: %r", error)
            self._breaker.failed(time.monotonic())
        else:
            if reports or places:  # the store was asked
                self._breaker.succeeded()
        renewed.set()
