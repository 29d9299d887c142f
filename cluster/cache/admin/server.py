"""The administrators' HTTP server, in one process without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from cluster.cache.admin.credential import Credential
from cluster.cache.admin.http_app import create_admin_app
from cluster.cache.admin.service import CacheAdminService
from cluster.cache.admin.work import Work
from cluster.errors import ConfigError

_MAX_WORK, _MAX_IMPORTS = 8, 4
_DRAIN_S = 5


@dataclass(frozen=True, slots=True)
class AdminServerSettings:
    """port 0: any free port. certificate_file, key_file: for TLS; both or neither."""

    host: str = "127.0.0.1"
    port: int = 8001
    certificate_file: Path | None = None
    key_file: Path | None = None


class _Server(uvicorn.Server):
    """Leaves signals to the caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_admin(
    service: CacheAdminService,
    credential: Credential,
    settings: AdminServerSettings,
    stop: asyncio.Event,
    on_ready: Callable[[int], None],
) -> None:
    """Serve until `stop` is set; open requests then have a few seconds to end. on_ready is called with the port.

    Raises ConfigError for an unusable address or certificate.
    """
    work, imports = Work("actions", _MAX_WORK), Work("imports", _MAX_IMPORTS)
    listener = _listen(settings)
    http = _Server(
        uvicorn.Config(
            create_admin_app(service, credential, work, imports),
            log_config=None,
            ssl_certfile=settings.certificate_file,
            ssl_keyfile=settings.key_file,
            timeout_graceful_shutdown=_DRAIN_S,
        )
    )
    _load(http.config)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        on_ready(listener.getsockname()[1])
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        http.should_exit = True
        await serving
        await asyncio.to_thread(work.close)  # waits for running tasks, which may need this loop
        await asyncio.to_thread(imports.close)


def _load(config: uvicorn.Config) -> None:
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"the certificate or its key cannot be used: {error.strerror or error}") from None


def _listen(settings: AdminServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); choose another port with --port"
        ) from None
