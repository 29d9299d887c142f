"""Opens the leases of tenants' limits at the shared cache's server."""

from __future__ import annotations

import logging
from dataclasses import replace

from cache_service.store.connection import Connection
from cluster.cache.access import connection_settings
from cluster.config import CacheConfig
from cluster.errors import ConfigError
from cluster.tenants.lease import CALL_LIMIT_S
from cluster.tenants.lease_store import LeaseStore
from cluster.tenants.place_store import PlaceStore
from cluster.tenants.renewal import LeaseRenewal

logger = logging.getLogger(__name__)


def lease_renewal(config: CacheConfig) -> LeaseRenewal | None:
    """None where the configuration names no server, or its secrets cannot be read here."""
    try:
        settings = connection_settings(config)
    except ConfigError as error:
        logger.error("limits of tenants are enforced by equal shares: %s", error)
        return None
    if settings is None:
        return None
    # Nothing is asked twice, since a report counts as often as it comes.
    limit_s = CALL_LIMIT_S
    settings = replace(settings, connect_timeout_s=limit_s, read_timeout_s=limit_s, num_retries=0, max_connections=1)
    connection = Connection(settings)
    return LeaseRenewal(LeaseStore(connection), PlaceStore(connection))
