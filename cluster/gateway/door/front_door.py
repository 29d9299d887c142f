"""Changes to Serve's proxies, made in their processes before they listen: limits, TLS, and our format of their errors.

Serve (Ray 2.60) takes no options for these, so names that its proxy looks up at its start are replaced here. The
settings come with the gRPC options that `paceline serve` hands to Serve, or in an environment variable where Serve is
started by others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import uvicorn.config
from pydantic import Field
from ray.serve._private import constants, default_impl, grpc_util, http_util, proxy
from ray.serve._private.request_router import replica_wrapper

from cache_service.options import Options
from cluster.gateway.door import gateway_sockets, proxy_status
from cluster.gateway.door.certificates import Certificates
from cluster.gateway.door.http_limits import LimitedHttpProtocol
from cluster.gateway_config import GatewayConfig, TlsConfig
from cluster.tenants.known_keys import KnownKeys

if TYPE_CHECKING:
    from cluster.tenants.access import TenantAccess

SETTINGS_VARIABLE = "PACELINE_FRONT_DOOR"
MIDDLEWARES = "cluster.gateway.door.proxy_errors.middlewares"

GRPC_MARGIN_BYTES = 64 * 1024  # a message's size beyond that of its texts
MAX_METADATA_BYTES = 64 * 1024
_MAX_ANSWER_BYTES = 1 << 30  # that Serve's transport over gRPC brings from a replica in one piece
_HANDSHAKE_WITHIN_MS = 10_000
_IDLE_MS = 60_000  # without a call; clients connect again when they have one
_PING_EVERY_MS = 60_000  # so that clients that are gone do not keep their connections
_WILDCARD = "[::]:"
_HTTP_PROTOCOL = "cluster.gateway.door.http_limits:LimitedHttpProtocol"


class FrontDoor(Options):
    """Settings of the proxies."""

    grpc_host: str | None = None
    """Address that gRPC listens on. null: every interface, as Serve does."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = GatewayConfig().max_body_bytes
    """As `gateway.max_body_bytes`."""
    max_connections: Annotated[int, Field(ge=1)] = GatewayConfig().max_connections
    """As `gateway.max_connections`."""
    asks_for_keys: bool = False
    """Whether calls need a key, so that nothing of one without is read."""
    may_be_open: bool = False
    """With asks_for_keys: whether they need none until there is a registry."""
    tenants_file: Path | None = None
    """Registry of the keys that are known, an absolute path. null: any key counts as known."""
    tls: TlsConfig = TlsConfig()
    """As `gateway.tls`, with absolute paths."""

    @classmethod
    def of(cls, config: GatewayConfig, access: TenantAccess | None) -> FrontDoor:
        """access: None: no keys are asked for."""
        files = {name: path and path.expanduser().absolute() for name, path in config.tls}
        return cls(
            grpc_host=config.host,
            max_body_bytes=config.max_body_bytes,
            max_connections=config.max_connections,
            asks_for_keys=access is not None,
            may_be_open=access is not None and access.may_be_open,
            tenants_file=None if access is None else access.file,
            tls=TlsConfig(**files),
        )

    def known_keys(self) -> KnownKeys | None:
        """None: no keys are asked for."""
        return KnownKeys(self.tenants_file, self.may_be_open) if self.asks_for_keys else None


_installed: FrontDoor | None = None


def current() -> FrontDoor:
    """The settings of this process, installed if they were not."""
    return _installed or install(FrontDoor.model_validate_json(os.environ.get(SETTINGS_VARIABLE) or "{}"))


def install(door: FrontDoor) -> FrontDoor:
    """Replace what a proxy that starts later in this process uses. A second call replaces the first."""
    global _installed
    certificates = Certificates(door.tls) if door.tls.certificate_file is not None else None
    # The proxy of a Ray cluster that was started without us, too.
    http_util.RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH = MIDDLEWARES
    LimitedHttpProtocol.max_connections = door.max_connections
    uvicorn.config.HTTP_PROTOCOLS["auto"] = _HTTP_PROTOCOL
    constants.DEFAULT_GRPC_SERVER_OPTIONS[:] = grpc_server_options(door)
    # Serve has one limit for calls to replicas and for their answers.
    replica_wrapper.RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH = _MAX_ANSWER_BYTES
    # This service would list the applications to anybody; gRPC health tells how the server is.
    grpc_util.add_RayServeAPIServiceServicer_to_server = lambda servicer, server: None
    proxy.HTTPProxy.send_request_to_replica = gateway_sockets.send_request
    proxy.gRPCProxy.send_request_to_replica = gateway_sockets.send_grpc_request
    proxy.get_http_response_status = proxy_status.http_status
    proxy.get_grpc_response_status = proxy_status.grpc_status

    def add_grpc_address(server: Any, address: str) -> None:
        if door.grpc_host is not None and address.startswith(_WILDCARD):
            host = f"[{door.grpc_host}]" if ":" in door.grpc_host else door.grpc_host
            address = f"{host}:{address.removeprefix(_WILDCARD)}"
        if certificates is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, certificates.grpc_credentials())

    default_impl.add_grpc_address = add_grpc_address
    if certificates is not None:
        uvicorn.config.create_ssl_context = lambda *_, **__: certificates.http_context()
    _installed = door
    return door


def grpc_server_options(door: FrontDoor) -> list[tuple[str, int]]:
    """Options of the proxy's gRPC server. What is larger is refused by its length, before it is read."""
    return [
        ("grpc.max_send_message_length", constants.RAY_SERVE_GRPC_MAX_MESSAGE_SIZE),
        ("grpc.max_receive_message_length", door.max_body_bytes + GRPC_MARGIN_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_WITHIN_MS),
        ("grpc.max_allowed_incoming_connections", door.max_connections),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.keepalive_time_ms", _PING_EVERY_MS),
        ("grpc.keepalive_timeout_ms", _PING_EVERY_MS),
    ]
