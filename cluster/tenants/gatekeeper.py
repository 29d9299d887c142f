"""Authenticates the calls of tenants, for HTTP and gRPC alike."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from prometheus_client import Counter

from cluster.errors import ConfigError
from cluster.tenants.access import TenantAccess
from cluster.tenants.errors import OverLimit, TenantDisabled, Unauthenticated
from cluster.tenants.keys import bearer_key, key_digest
from cluster.tenants.limiter import TenantLimiter
from cluster.tenants.registry import Registry, StoredKey, StoredTenant, TenantLimits, now_utc
from cluster.tenants.registry_file import RegistryFollower
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


@dataclass(frozen=True, slots=True)
class _Entry:
    """A key and its tenant."""

    digest: bytes
    key: StoredKey
    tenant: Tenant
    is_disabled: bool


class Gatekeeper:
    """One per gateway replica. Follows the registry file and keeps the state of rate limits, but no state of calls."""

    def __init__(
        self,
        access: TenantAccess,
        num_processes: int,
        refusals: Counter,
        failures: Counter,
        clock: Callable[[], datetime] = now_utc,
    ) -> None:
        """num_processes: gateways, which share the limits equally. refusals: by reason, which is missing_key,
        unknown_key, disabled, or the name of the limit. failures: unusable states of the registry file; the one before
        stays in force. Raises ConfigError if a registry is required and cannot be read."""
        self._access = access
        self._num_processes = num_processes
        self._refusals = refusals
        self._clock = clock
        self._follower = RegistryFollower(access.file, failures.inc)
        self._known: Registry | None = None
        self._by_digest: dict[bytes, _Entry] = {}
        self._limiters: dict[str, TenantLimiter] = {}
        if not access.may_be_open and self._follower.current() is None:
            raise ConfigError(f"{access.file}: there are no tenants; `paceline tenant add NAME` makes the file")

    @property
    def asks_for_keys(self) -> bool:
        """False while there is no registry, so that everybody is served."""
        return self._follower.current() is not None

    def enter(self, authorization: Iterable[str]) -> Tenant | None:
        """The tenant of a call, charged with one request. None: there is no registry, so no key is needed.

        authorization: all values of the header (HTTP) or metadata key (gRPC) of that name. Raises Unauthenticated,
        TenantDisabled or OverLimit, and counts them.
        """
        registry = self._follower.current()
        if registry is None:
            return None
        if registry is not self._known:
            self._take_in(registry)
        with self.counting_refusals():
            entry = self._entry_of(bearer_key(authorization))
            if entry.is_disabled:
                raise TenantDisabled()
            entry.tenant.limiter.take_request()
        return entry.tenant

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except (Unauthenticated, TenantDisabled, OverLimit) as error:
            self._refusals.labels(error.limit_name if isinstance(error, OverLimit) else error.reason).inc()
            raise

    def _entry_of(self, key: str) -> _Entry:
        """Takes one digest and one constant-time comparison whether or not the key is known. Timing of the dictionary
        lookup leaks nothing, since nobody can construct keys by a prefix of their SHA-256."""
        digest = key_digest(key)
        entry = self._by_digest.get(digest)
        is_equal = hmac.compare_digest(digest, _NO_DIGEST if entry is None else entry.digest)
        if entry is None or not is_equal or not entry.key.is_live(self._clock()):
            raise Unauthenticated("unknown_key")
        return entry

    def _take_in(self, registry: Registry) -> None:
        limiters = {tenant.id: self._limiter(tenant) for tenant in registry.tenants}
        self._by_digest = {}
        for stored in registry.tenants:
            policy = stored.policy
            if policy == "shared" and not self._access.allow_shared:
                logger.warning("tenant %s has policy shared, which tenants.allow_shared rules out here", stored.id)
                policy = "isolated"
            elif policy == "promoted" and not self._access.allow_promoted:
                logger.warning("tenant %s has policy promoted; cache.promotion.enabled is false here", stored.id)
                policy = "isolated"
            may_write = stored.limits.cache_bytes != 0
            sharing = Sharing(
                stored.id, policy, stored.group, server_key=bytes.fromhex(registry.server_key), may_write=may_write
            )
            tenant = Tenant(stored.id, sharing, stored.limits, limiters[stored.id])
            for key in stored.keys:
                digest = bytes.fromhex(key.sha256)
                self._by_digest[digest] = _Entry(digest, key, tenant, stored.disabled)
        self._limiters = limiters
        self._known = registry

    def _limiter(self, tenant: StoredTenant) -> TenantLimiter:
        """Keeps a tenant's limiter, with what is used up, when the file changes."""
        limiter = self._limiters.get(tenant.id)
        if limiter is None:
            return TenantLimiter(tenant.limits, self._num_processes)
        limiter.change(tenant.limits)
        return limiter
