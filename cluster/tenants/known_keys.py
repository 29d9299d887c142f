"""Whether a call's key may be used, for proxies, which let only such calls send their bodies. The gateway behind them
authenticates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from cluster.errors import ConfigError
from cluster.tenants.errors import TenantDisabled, Unauthenticated
from cluster.tenants.keys import bearer_key, key_digest
from cluster.tenants.registry import Registry, now_utc
from cluster.tenants.registry_file import RegistryFollower

logger = logging.getLogger(__name__)


class KnownKeys:
    """Follows the registry file. Where there is none, any key may be known."""

    def __init__(self, file: Path | None, may_be_open: bool = False, clock: Callable[[], datetime] = now_utc) -> None:
        """may_be_open: whether no key is asked for while there is no registry."""
        self._may_be_open = may_be_open
        self._clock = clock
        self._follower: RegistryFollower | None = None
        if file is None:
            return
        try:
            self._follower = RegistryFollower(file, lambda: None)
        except ConfigError as error:
            logger.error("%s; bodies of calls with any key are read", error)

    def require(self, authorization: Iterable[str]) -> None:
        """authorization: all values of the header (HTTP) or metadata key (gRPC) of that name. Raises Unauthenticated
        for a key that is missing, unknown or expired, TenantDisabled for a disabled tenant's."""
        if self._may_be_open and self._current() is None:
            return
        digest = key_digest(bearer_key(authorization))
        try:
            self._check(digest)
        except (Unauthenticated, TenantDisabled):
            # Looks again before it refuses: a gateway may have seen a new key within the last second.
            self._check(digest, afresh=True)

    def _check(self, digest: bytes, afresh: bool = False) -> None:
        registry = self._current(afresh)
        if registry is None:
            return
        found = registry.find(digest)
        if found is None:
            raise Unauthenticated("unknown_key")
        key, tenant = found
        if not key.is_live(self._clock()):
            raise Unauthenticated("unknown_key")
        if tenant.disabled:
            raise TenantDisabled()

    def _current(self, afresh: bool = False) -> Registry | None:
        return None if self._follower is None else self._follower.current(afresh)
