"""Opens the administration of a cluster's shared cache, whether the cluster runs or not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from actors.home import paceline_home
from cache_service.admin.administration import CacheAdministration
from cache_service.admin.audit_log import AuditLog, os_user
from cache_service.errors import AuditError, CacheError, ServerError
from cache_service.index.index_files import default_directory
from cache_service.store.connection import Connection, ConnectionSettings
from cache_service.store.embedded_server import EmbeddedServer, running_server
from cluster.cache.access import connection_settings, data_directory, key_ring
from cluster.cache.promotion import terms_of
from cluster.config import NO_CACHE, CacheConfig, ClusterConfig
from cluster.errors import ConfigError
from cluster.tenants.registry import Registry

_READ_TIMEOUT_S = 10.0  # no round waits for it
_PATIENCE_S = 5.0  # while a server is starting or stopping


@contextmanager
def administered(config: CacheConfig, actor: str) -> Iterator[CacheAdministration]:
    """Administration of the server at `cache.url`, or of the cluster's own server, started for the block if it does not
    run. Raises ConfigError."""
    if config.url == NO_CACHE:
        raise ConfigError("cache.url is 'none', so there is no cache; give another with --url or --directory")
    settings, ring = connection_settings(config), key_ring(config)
    with ExitStack() as stack:
        owns_server = settings is None
        if settings is None:
            settings = stack.enter_context(_own_server(config))
        try:
            audit = AuditLog(paceline_home() / "cache-audit.jsonl")
        except AuditError as error:
            raise ConfigError(str(error)) from None
        stack.callback(audit.close)
        connection = Connection(replace(settings, read_timeout_s=_READ_TIMEOUT_S))
        stack.callback(connection.close)
        yield CacheAdministration(
            connection,
            ring,
            audit,
            actor=actor,
            index_directory=config.index_directory or default_directory(),
            owns_server=owns_server,
        )


@contextmanager
def _own_server(config: CacheConfig) -> Iterator[ConnectionSettings]:
    directory = data_directory(config)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        settings = running_server(directory)
        if settings is not None:
            yield settings
            return
        try:
            server = EmbeddedServer(directory, max_memory_bytes=config.max_memory_bytes)
        except (ServerError, OSError) as error:
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise ConfigError(f"the cache's own server cannot be used: {error}") from None
        with server:
            yield server.settings
        return


@contextmanager
def told_in_one_line() -> Iterator[None]:
    """Raise a CacheError of the block as a ConfigError."""
    try:
        yield
    except CacheError as error:
        raise ConfigError(str(error)) from None


def feeders(config: ClusterConfig, registry: Registry | None) -> frozenset[str]:
    """Organisations that may feed the public pool."""
    return frozenset() if registry is None else terms_of(registry, config.cache.promotion).members


def withdraw_those_gone(config: ClusterConfig, before: frozenset[str], registry: Registry | None) -> bool:
    """Withdraw those of `before` that may no longer feed the public pools, and admit new feeders.

    Returns whether a pool was affected. Raises ConfigError and CacheError; routers of a running cluster do the same at
    their next look at the registry.
    """
    if registry is None:
        return False
    terms = terms_of(registry, config.cache.promotion)
    gone = before - terms.members
    if terms.members == before or not _may_have_data(config):
        return False
    with administered(config.cache, f"cli {os_user()}") as administration:
        pools = administration.withdraw(gone, terms)
    return bool(gone and pools)


def _may_have_data(config: ClusterConfig) -> bool:
    if config.cache.url is None:
        return data_directory(config.cache).is_dir()
    return config.cache.url != NO_CACHE
