"""Runs a cluster's own cache server: started before its routers, restarted when it ends, stopped after them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from cache_service.errors import ServerError, StoreRefused, StoreUnavailable
from cache_service.store.answers import faults_told
from cache_service.store.connection import Connection, ConnectionSettings
from cache_service.store.embedded_server import EmbeddedServer
from cache_service.store.server_watch import ServerWatch
from cluster.cache.access import connection_settings, data_directory, key_ring
from cluster.config import NO_CACHE, CacheConfig


@contextmanager
def cluster_cache(config: CacheConfig, say: Callable[[str], None]) -> Iterator[CacheConfig]:
    """Cache settings for routers, with the `url` of a server that runs during the block, or "none" if it cannot start.

    The settings name the server's password file, not the password. say: called with one line on the result. A failed
    server only disables the cache; unusable settings raise ConfigError.
    """
    if config.url == NO_CACHE:
        say("none")
        yield config
        return
    key_ring(config)
    settings = connection_settings(config)
    if settings is not None:
        say(f"{settings}{_fault_of(settings)}")
        yield config
        return
    server = _start(config, say)
    if server is None:
        yield config.model_copy(update={"url": NO_CACHE})
        return
    with server:
        watch = ServerWatch(server)
        try:
            yield config.model_copy(update={"url": server.url, "password_file": server.password_file})
        finally:
            watch.close()


def _fault_of(settings: ConnectionSettings) -> str:
    """Why the server cannot be used now, for the terminal (routers only log it); "" if it answers."""
    connection = Connection(replace(settings, num_retries=0))
    try:
        with faults_told():
            connection.client().ping()
    except StoreRefused:
        return ""  # this user may not ping; the server answers
    except StoreUnavailable as error:
        return f"; there is none until it can be used: {error}"
    finally:
        connection.close()
    return ""


def _start(config: CacheConfig, say: Callable[[str], None]) -> EmbeddedServer | None:
    directory = data_directory(config)
    try:
        server = EmbeddedServer(directory, max_memory_bytes=config.max_memory_bytes)
    except (ServerError, OSError) as error:
        say(f"none: {error}")
        return None
    say(f"{directory}, a server of its own at {server.url}")
    return server
