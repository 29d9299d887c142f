"""The administrators' server: HTTP and gRPC in one process, without Ray, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster.cache.admin.credential import Credential
from cluster.cache.admin.grpc_servicer import SERVICE_NAME, CacheAdminServicer, CredentialCheck
from cluster.cache.admin.http_app import create_admin_app
from cluster.cache.admin.service import CacheAdminService
from cluster.cache.admin.work import Work
from cluster.errors import ConfigError
from cluster.gateway.paceline.v1.cache_admin_pb2_grpc import add_CacheAdminServicer_to_server

_MAX_WORK, _MAX_IMPORTS = 8, 4
_MAX_MESSAGE_BYTES = 64 * 2**20
_DRAIN_S = 5


@dataclass(frozen=True, slots=True)
class AdminServerSettings:
    """Where to listen. A port of 0: any that is free. certificate_file, key_file: for TLS on both ports, or neither."""

    host: str = "127.0.0.1"
    http_port: int = 8001
    grpc_port: int = 9001
    certificate_file: Path | None = None
    key_file: Path | None = None


class _Server(uvicorn.Server):
    """Leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_admin(
    service: CacheAdminService,
    credential: Credential,
    settings: AdminServerSettings,
    stop: asyncio.Event,
    on_ready: Callable[[int, int], None],
) -> None:
    """Serve until told to stop; what is under way has a few seconds to end. on_ready: told both ports.

    Raises ConfigError for an address that cannot be listened on, or a certificate that cannot be used.
    """
    work, imports = Work("actions", _MAX_WORK), Work("imports", _MAX_IMPORTS)
    rpc = grpc.aio.server(
        interceptors=(CredentialCheck(credential),),
        options=[("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)],
    )
    servicer = CacheAdminServicer(service, work, imports)
    add_CacheAdminServicer_to_server(servicer, rpc)  # type: ignore[no-untyped-call]  # generated
    await _add_health(rpc)
    listener = _http_socket(settings)
    grpc_port = _grpc_port(rpc, settings)
    app = create_admin_app(service, credential, work, imports)
    http = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            ssl_certfile=_text(settings.certificate_file),
            ssl_keyfile=_text(settings.key_file),
            timeout_graceful_shutdown=_DRAIN_S,
        )
    )
    _load(http.config)
    await rpc.start()
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        on_ready(listener.getsockname()[1], grpc_port)
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        http.should_exit = True
        await rpc.stop(_DRAIN_S)
        await serving
        await asyncio.to_thread(work.close)  # what has begun ends, and may need this loop for it
        await asyncio.to_thread(imports.close)


def _load(config: uvicorn.Config) -> None:
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"the certificate or its key cannot be used: {error.strerror or error}") from None


def _http_socket(settings: AdminServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.http_port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.http_port} ({error.strerror}); choose another port with --port"
        ) from None


def _grpc_port(rpc: grpc.aio.Server, settings: AdminServerSettings) -> int:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.grpc_port}"
    try:
        if settings.certificate_file is None or settings.key_file is None:
            return int(rpc.add_insecure_port(address))
        pair = (settings.key_file.read_bytes(), settings.certificate_file.read_bytes())
        return int(rpc.add_secure_port(address, grpc.ssl_server_credentials([pair])))
    except (RuntimeError, OSError, ValueError) as error:
        reason = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise ConfigError(f"cannot listen on {address}{reason}; choose another port with --grpc-port") from None


async def _add_health(rpc: grpc.aio.Server) -> None:
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, rpc)
    for name in ("", SERVICE_NAME):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
