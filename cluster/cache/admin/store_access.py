"""How an administrator gets at the shared cache of a cluster, whether that runs or not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from cache_service.admin.administration import CacheAdministration
from cache_service.admin.audit_log import AuditLog
from cache_service.errors import AuditError, CacheError, ServerError
from cache_service.index.index_files import default_directory
from cache_service.store.connection import Connection, ConnectionSettings
from cache_service.store.embedded_server import EmbeddedServer, running_server
from cluster.cache.access import connection_settings, data_directory, key_ring
from cluster.config import NO_CACHE, CacheConfig
from cluster.errors import ConfigError

_READ_TIMEOUT_S = 10.0  # nobody's round waits for it
_PATIENCE_S = 5.0  # for a server that is just being started or stopped


@contextmanager
def administered(config: CacheConfig, audit_file: Path, actor: str) -> Iterator[CacheAdministration]:
    """The administration of the server that `cache.url` names; of the cluster's own, if it runs; else of its data, with
    a server that lasts as long as the block. Raises ConfigError."""
    if config.url == NO_CACHE:
        raise ConfigError("cache.url is 'none', so there is no cache; give another with --url or --directory")
    settings, ring = connection_settings(config), key_ring(config)
    with ExitStack() as stack:
        owns_server = settings is None
        if settings is None:
            settings = stack.enter_context(_own_server(config))
        try:
            audit = AuditLog(audit_file)
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
    """Errors of the cache in the block as one that the command line shows."""
    try:
        yield
    except CacheError as error:
        raise ConfigError(str(error)) from None
