"""Authenticates the calls of tenants, for HTTP and gRPC alike."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from prometheus_client import Counter

from actors.messages import ServiceClass
from cluster.errors import ConfigError
from cluster.tenants.access import TenantAccess
from cluster.tenants.errors import OverLimit, TenantDisabled, Unauthenticated
from cluster.tenants.keys import bearer_key, key_digest
from cluster.tenants.limiter import TenantLimiter
from cluster.tenants.registry import Registry, StoredTenant, TenantLimits, now_utc
from cluster.tenants.registry_file import RegistryFollower
from cluster.tenants.renewal import LeaseRenewal
from cluster.tenants.scope import Sharing

logger = logging.getLogger(__name__)

_NO_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose behalf a call is made."""

    id: str
    sharing: Sharing
    limits: TenantLimits
    limiter: TenantLimiter = field(repr=False, compare=False)
    service_class: ServiceClass = "interactive"  # of requests that do not say


class Gatekeeper:
    """One per gateway replica. Follows the registry file and keeps the state of rate limits, but no state of calls."""

    def __init__(
        self,
        access: TenantAccess,
        num_processes: int,
        refusals: Counter,
        failures: Counter,
        clock: Callable[[], datetime] = now_utc,
        renewal: LeaseRenewal | None = None,
    ) -> None:
        """num_processes: gateways, which share the limits. refusals: by reason, which is missing_key, unknown_key,
        disabled, or the name of the limit. failures: unusable states of the registry file; the one before stays in
        force. renewal: None: limits are shared equally. Raises ConfigError if a registry is required and cannot be
        read."""
        self._access = access
        self._num_processes = num_processes
        self._refusals = refusals
        self._renewal = renewal
        self._clock = clock
        self._follower = RegistryFollower(access.file, failures.inc)
        self._registry: Registry | None = None
        self._met: dict[str, tuple[StoredTenant, Tenant]] = {}  # tenants that have called, by id
        if not access.may_be_open and self._follower.current() is None:
            raise ConfigError(f"{access.file}: there are no tenants; `paceline tenant add NAME` makes the file")

    @property
    def asks_for_keys(self) -> bool:
        """False while there is no registry, so that everybody is served."""
        return self._follower.current() is not None

    async def enter(self, authorization: Iterable[str]) -> Tenant | None:
        """The tenant of a call, charged with one request. None: there is no registry, so no key is needed.

        authorization: all values of the header (HTTP) or metadata key (gRPC) of that name. Raises Unauthenticated,
        TenantDisabled or OverLimit, and counts them.
        """
        registry = self._follower.current()
        if registry is None:
            return None
        with self.counting_refusals():
            key = bearer_key(authorization)
            try:
                stored = self._tenant_of(registry, key)
            except Unauthenticated:
                newer = self._follower.current(afresh=True)  # another gateway may know the key since this second
                if newer is None or newer is registry:
                    raise
                registry, stored = newer, self._tenant_of(newer, key)
            if registry is not self._registry:
                self._met = {tenant_id: met for tenant_id, met in self._met.items() if tenant_id in registry}
                self._registry = registry
            if stored.disabled:
                raise TenantDisabled()
            tenant = self._meet(stored, registry)
            if self._renewal is not None:
                self._renewal.use(stored.id, tenant.limiter)
                await self._renewal.first_lease(tenant.limiter)
            tenant.limiter.take_request()
        return tenant

    async def await_places(self, tenant: Tenant, count: int) -> None:
        """Wait for a moment for the places of so many sequences, if this gateway has too few and may get more."""
        if self._renewal is not None:
            await self._renewal.places(tenant.id, tenant.limiter, count)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except (Unauthenticated, TenantDisabled, OverLimit) as error:
            self._refusals.labels(error.limit_name if isinstance(error, OverLimit) else error.reason).inc()
            raise

    def _tenant_of(self, registry: Registry, key: str) -> StoredTenant:
        """Takes one digest and one constant-time comparison whether or not the key is known. Timing of the dictionary
        lookup leaks nothing, since nobody can construct keys by a prefix of their SHA-256."""
        digest = key_digest(key)
        found = registry.find(digest)
        is_equal = hmac.compare_digest(digest, _NO_DIGEST if found is None else bytes.fromhex(found[0].sha256))
        if found is None or not is_equal or not found[0].is_live(self._clock()):
            raise Unauthenticated("unknown_key")
        return found[1]

    def _meet(self, stored: StoredTenant, registry: Registry) -> Tenant:
        """Keeps a tenant's limiter, with what is used up, when the tenant changes."""
        met = self._met.get(stored.id)
        if met is not None and met[0] is stored:
            return met[1]
        if met is None:
            limiter = TenantLimiter(stored.limits, self._num_processes, is_leased=self._renewal is not None)
        else:
            limiter = met[1].limiter
        limiter.change(stored.limits)
        tenant = Tenant(stored.id, self._sharing(stored, registry), stored.limits, limiter, stored.service_class)
        self._met[stored.id] = stored, tenant
        return tenant

    def _sharing(self, stored: StoredTenant, registry: Registry) -> Sharing:
        policy = stored.policy
        if policy == "shared" and not self._access.allow_shared:
            logger.warning("tenant %s has policy shared, which tenants.allow_shared rules out here", stored.id)
            policy = "isolated"
        elif policy == "promoted" and not self._access.allow_promoted:
            logger.warning("tenant %s has policy promoted; cache.promotion.enabled is false here", stored.id)
            policy = "isolated"
        server_key, may_write = bytes.fromhex(registry.server_key), stored.limits.cache_bytes != 0
        return Sharing(
            stored.id,
            policy,
            stored.group,
            server_key=server_key,
            may_write=may_write,
            has_regions=self._access.has_regions,
        )
