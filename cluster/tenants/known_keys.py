"""Whether a call's key is in the registry, for proxies, which let only such calls send their bodies. The gateway behind
them authenticates."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from cluster.errors import ConfigError
from cluster.tenants.errors import Unauthenticated
from cluster.tenants.gatekeeper import bearer_key
from cluster.tenants.keys import key_digest
from cluster.tenants.registry import Registry
from cluster.tenants.registry_file import RegistryFollower

logger = logging.getLogger(__name__)


class KnownKeys:
    """Follows the registry file. Where there is none, any key may be known."""

    def __init__(self, file: Path | None) -> None:
        self._follower: RegistryFollower | None = None
        self._registry: Registry | None = None
        self._digests: frozenset[bytes] = frozenset()
        if file is None:
            return
        try:
            self._follower = RegistryFollower(file, lambda: None)
        except ConfigError as error:
            logger.error("%s; bodies of calls with any key are read", error)

    def require(self, authorization: Iterable[str]) -> None:
        """authorization: all values of the header (HTTP) or metadata key (gRPC) of that name. Raises Unauthenticated
        for a key that is missing or unknown."""
        digest = key_digest(bearer_key(authorization))
        # Looks again before it refuses: a gateway may have seen a new key within the last second.
        if not self._may_be_known(digest) and not self._may_be_known(digest, afresh=True):
            raise Unauthenticated("unknown_key")

    def _may_be_known(self, digest: bytes, afresh: bool = False) -> bool:
        registry = None if self._follower is None else self._follower.current(afresh)
        if registry is None:
            return True
        if registry is not self._registry:
            self._digests = frozenset(bytes.fromhex(key.sha256) for one in registry.tenants for key in one.keys)
            self._registry = registry
        return digest in self._digests
