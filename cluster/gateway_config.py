"""The gateway's part of the configuration, in a module of its own: Serve's proxies need it, and start sooner without
the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from cache_service.options import Options

_HostName = Annotated[str, Field(min_length=1, max_length=253)]
_ORIGIN = r"^(\*|(https?|[a-z]+-extension)://[^/\s]+)$"


class TlsConfig(Options):
    """Certificates of the gateway's ports, HTTP and gRPC. Files that change are read again within seconds."""

    certificate_file: Path | None = None
    """Certificate chain, PEM. null: no TLS."""
    key_file: Path | None = None
    """Private key of certificate_file, PEM, without a password."""
    client_ca_file: Path | None = None
    """Authorities of clients' certificates. With it, every call but probes needs such a certificate."""

    @model_validator(mode="after")
    def _files(self) -> TlsConfig:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificate_file and key_file go together")
        if self.client_ca_file is not None and self.certificate_file is None:
            raise ValueError("client_ca_file needs certificate_file and key_file")
        return self


class GatewayConfig(Options):
    """HTTP and gRPC: addresses, limits of requests, and how answers are streamed."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    http_port: Annotated[int, Field(ge=1, le=65_535)] = 8000
    """Port of HTTP."""
    grpc_port: Annotated[int, Field(ge=1, le=65_535)] = 9000
    """Port of gRPC."""
    replicas: Annotated[int, Field(ge=1, le=256)] = 2
    """Gateway processes. With two, the loss of one costs its own streams alone."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 4096
    """The most tokens that a request may ask for."""
    default_max_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens of an answer whose request does not say."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds from a request to the end of its answer."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024
    """Size of the largest request that is read."""
    max_connections: Annotated[int, Field(ge=1, le=100_000)] = 500
    """HTTP connections of a proxy, of which each node has one. Beyond them, connections that wait for a request give
    way; if there are none, new ones are refused (503). As many gRPC connections and open gRPC calls are taken,
    and more are refused."""
    max_stops: Annotated[int, Field(ge=1, le=1024)] = 16
    """Stop strings of a request. OpenAI takes 4."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """What happens to parameters that no server is known to have. Known ones that are not supported are always refused,
    unless their value changes nothing."""
    grpc_reflection: bool = True
    """Whether gRPC clients may list the services."""
    page: bool = True
    """Whether to serve a page for trying the cluster at /, and a description of the API at /docs."""
    stream_interval_ms: Annotated[float, Field(ge=0, le=10_000)] | None = None
    """Milliseconds between the chunks of a streamed answer. null: 100 with tenants, else 0, which is as they come."""
    stream_tokens: Annotated[int, Field(ge=0, le=4096)] = 0
    """Tokens of a chunk. 0: as many as there are."""
    stream_obfuscation: bool | None = None
    """Whether to pad chunks to a few sizes, unless a request says otherwise. null: with tenants."""
    metrics_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Port that serves /metrics and nothing else. null: without tenants /metrics is on http_port; with tenants there is
    none, since it would tell them of each other."""
    metrics_host: str = "127.0.0.1"
    """Address of metrics_port."""
    metrics_interval_s: Annotated[float, Field(ge=0, le=3600)] | None = None
    """Seconds between the snapshots that /metrics shows; 0: it is always current. null: 15 with tenants, else 0."""
    allowed_hosts: Annotated[tuple[_HostName, ...], Field(min_length=1)] | None = None
    """Names in the Host header that are answered, without port; "*.example.com": all below; ["*"]: any. null: where
    host is a loopback address, its names and host itself; otherwise any. Probes are always answered."""
    cors_origins: tuple[Annotated[str, Field(pattern=_ORIGIN)], ...] = ()
    """Origins of web pages that may call, such as https://app.example.com; ["*"]: any. Where allowed_hosts limits the
    names, calls from other pages than the server's own are refused; elsewhere browsers keep answers from them."""
    tls: TlsConfig = TlsConfig()
    """TLS of http_port and grpc_port."""
