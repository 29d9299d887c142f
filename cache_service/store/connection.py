"""Connecting to Redis or Valkey: one server, Sentinel or Cluster, with TLS and ACL users."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, cast
from urllib.parse import unquote

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry
from redis.sentinel import Sentinel

from cache_service.errors import SettingError

Client = redis.Redis | RedisCluster

_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
# `urlsplit` takes an IPv6 address for an error if it is not the only host.
_PARTS = re.compile(r"(?P<scheme>[A-Za-z+]+)://(?P<places>[^/?#]*)(?P<path>[^?#]*)")
_DEFAULT_PORT = 6379
_DEFAULT_SENTINEL_PORT = 26379
_FORM = (
    "it must be redis://host:port/db, rediss://..., redis+sentinel://host:port,host:port/service or redis+cluster://..."
)

_BOUNDS = {
    "connect_timeout_s": (0.01, 60),
    "read_timeout_s": (0.01, 60),
    "num_retries": (0, 5),
    "max_connections": (1, 1024),
}


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL."""

    hosts: tuple[tuple[str, int], ...]
    mode: str  # "single", "sentinel" or "cluster"
    tls: bool
    database: int
    service: str  # name of the primary that Sentinel watches
    username: str | None
    password: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """How to reach the store. repr and errors leave passwords out. Raises SettingError.

    username and password override those of the URL. TLS (`rediss`) always verifies the server.
    """

    url: str = field(repr=False)
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: Path | None = None  # None: the system's certificate authorities
    certificate_file: Path | None = None  # the client's
    key_file: Path | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    connect_timeout_s: float = 1.0
    read_timeout_s: float = 2.0
    num_retries: int = 1  # after a lost connection; callers back off by themselves
    max_connections: int = 8

    def __post_init__(self) -> None:
        address = parse_url(self.url)
        for name, (low, high) in _BOUNDS.items():
            if not low <= getattr(self, name) <= high:  # false for NaN, too
                raise SettingError(name, getattr(self, name), f"it must be {low} to {high}")
        for name in ("ca_file", "certificate_file", "key_file"):
            path = getattr(self, name)
            if path is not None and not address.tls:
                raise SettingError(name, str(path), "it needs a URL with TLS: rediss://, rediss+sentinel://, ...")
            if path is not None and not path.is_file():
                raise SettingError(name, str(path), "it must be a file that exists")
        if (self.key_file is None) != (self.certificate_file is None):
            raise SettingError("key_file", str(self.key_file), "it must be given together with certificate_file")

    @property
    def address(self) -> Address:
        return parse_url(self.url)

    def at_node(self, host: str, port: int) -> ConnectionSettings:
        """The same settings for one node of a Cluster."""
        address = self.address
        return replace(
            self,
            url=f"{'rediss' if address.tls else 'redis'}://{f'[{host}]' if ':' in host else host}:{port}",
            username=self.username if self.username is not None else address.username,
            password=self.password if self.password is not None else address.password,
        )

    def __str__(self) -> str:
        """Without user and password, for logs."""
        address = self.address
        hosts = ",".join(f"{host}:{port}" for host, port in address.hosts)
        return f"{address.mode}{' with TLS' if address.tls else ''} {hosts}"


class Connection:
    """A client made on first use, since a Cluster client connects when it is made. Thread-safe."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.settings = settings
        self._lock = Lock()
        self._client: Client | None = None

    def client(self) -> Client:
        """Raises redis-py's exceptions, for Cluster also when no node answers."""
        with self._lock:
            if self._client is None:
                self._client = open_client(self.settings)
            return self._client

    def close(self) -> None:
        """Close the connections. Using it again opens new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


def open_notified_client(settings: ConnectionSettings) -> redis.Redis:
    """A client with one connection that takes push messages; not for Cluster, where each node would need one."""
    client = open_client(replace(settings, num_retries=0, max_connections=1), takes_pushes=True)
    if isinstance(client, RedisCluster):
        raise SettingError("url", str(settings), "Cluster is not followed by push messages")
    return client


def cluster_client(settings: ConnectionSettings) -> RedisCluster:
    """For settings whose URL is that of a Cluster. Raises redis-py's exceptions where no node answers."""
    return cast(RedisCluster, open_client(settings))


def open_client(settings: ConnectionSettings, *, takes_pushes: bool = False) -> Client:
    """A client with bounded timeouts. Only the Cluster client connects already."""
    address = settings.address
    every: dict[str, Any] = {
        "protocol": 3 if takes_pushes else 2,
        "socket_connect_timeout": settings.connect_timeout_s,
        "socket_timeout": settings.read_timeout_s,
        "retry": Retry(ExponentialWithJitterBackoff(cap=0.5, base=0.05), settings.num_retries),
    }
    if takes_pushes:
        every["maint_notifications_config"] = MaintNotificationsConfig(enabled=False)  # spares a handshake
    if address.tls:
        every |= {
            "ssl": True,
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            "ssl_ca_certs": _text(settings.ca_file),
            "ssl_certfile": _text(settings.certificate_file),
            "ssl_keyfile": _text(settings.key_file),
        }
    options = {
        **every,
        "username": settings.username if settings.username is not None else address.username,
        "password": settings.password if settings.password is not None else address.password,
        "max_connections": settings.max_connections,
    }
    if address.mode == "cluster":
        nodes = [
            ClusterNode(host, port)  # type: ignore[no-untyped-call]
            for host, port in address.hosts
        ]
        return RedisCluster(startup_nodes=nodes, **options)
    if address.mode == "sentinel":
        sentinel = Sentinel(  # type: ignore[no-untyped-call]
            address.hosts,
            sentinel_kwargs={
                **every,
                "username": settings.sentinel_username,
                "password": settings.sentinel_password,
            },
        )
        primary: redis.Redis = sentinel.master_for(  # type: ignore[no-untyped-call]
            address.service, db=address.database, **options
        )
        return primary
    ((host, port),) = address.hosts
    return redis.Redis(host, port, db=address.database, **options)


def parse_url(url: str) -> Address:
    """Raises SettingError, which shows the URL without user and password."""
    shown = re.sub(r"^([a-z+]+://)?.*@", r"\1...@", url, flags=re.DOTALL)  # passwords may hold unescaped characters
    shown = re.sub(r"\?.*", "?...", shown, flags=re.DOTALL)  # other clients take passwords here
    parts = _PARTS.fullmatch(url)
    if parts is None or (scheme := parts["scheme"].lower()) not in _SCHEMES:
        raise SettingError("url", shown, _FORM)
    mode = scheme.partition("+")[2] or "single"
    credentials, _, places = parts["places"].rpartition("@")
    username, _, password = credentials.partition(":")
    port = _DEFAULT_SENTINEL_PORT if mode == "sentinel" else _DEFAULT_PORT
    hosts = tuple(_parse_host(place, port, shown) for place in places.split(","))
    if mode == "single" and len(hosts) != 1:
        raise SettingError("url", shown, "a single server has one host; several belong to Sentinel or Cluster")
    path = [unquote(part) for part in parts["path"].split("/")[1:] if part]
    service = path.pop(0) if mode == "sentinel" and path else ""
    if mode == "sentinel" and not service:
        raise SettingError("url", shown, "Sentinel needs the name of its service: redis+sentinel://host:port/service")
    database = path.pop(0) if path else "0"
    if path or not re.fullmatch(r"[0-9]{1,5}", database) or (mode == "cluster" and database != "0"):
        raise SettingError("url", shown, "after the hosts it may have a database number only; Cluster has database 0")
    return Address(
        hosts=hosts,
        mode=mode,
        tls=scheme.startswith("rediss"),
        database=int(database),
        service=service,
        username=unquote(username) or None,
        password=unquote(password) or None,
    )


def _parse_host(text: str, default_port: int, shown: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?", text)
    port = int(match[2]) if match and match[2] else default_port
    # Labels of host names have 1 to 63 characters.
    is_name = match is not None and (match[1][0] == "[" or all(0 < len(part) < 64 for part in match[1].split(".")))
    if match is None or not is_name or not 1 <= port <= 65535:
        raise SettingError("url", shown, f"a host must be name:port with a port of 1 to 65535; {_FORM}")
    return match[1].strip("[]"), port


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
