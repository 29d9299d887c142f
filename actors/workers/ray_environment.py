"""Environment variables for a Ray that Paceline starts or joins. Ray reads them on import: it is not imported here."""

from __future__ import annotations

import ipaddress
import os
import secrets
from pathlib import Path

import psutil

from actors.workers.kernel_cache import can_be_made

_OWN_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Else a call of Ray's after its end would start another, which dies with the thread that made the call, and the
    # process a minute later.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.gateway.door.proxy_errors.middlewares",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.05",  # after three that fail, a lost proxy is replaced
    "RAY_SERVE_PROXY_USE_GRPC": "1",  # a chunk costs gateway and proxy a third less than as a Ray object
}
# Bytes of a call to a replica beyond a gRPC request's own: its metadata, and what Serve says of it.
_REPLICA_MARGIN_BYTES = 1 << 20

# As Ray does on macOS: a single machine, all ports listen on loopback.
_LOOPBACK_ONLY = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
_GCS_ARGUMENT = "--gcs-address="
_TOKEN_SETTINGS = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
_TOKEN_FILE = Path("~/.ray/auth_token")


def own_ray(max_body_bytes: int) -> dict[str, str]:
    """Variables of all processes of a Ray of ours. max_body_bytes: of the largest request to the gateway."""
    # Replicas listen on every interface, and read a call whole before they look at its token.
    limit = str(max_body_bytes + _REPLICA_MARGIN_BYTES)
    return {**_OWN_RAY, "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": limit}


def prepare_own_ray(gateway_host: str, max_body_bytes: int) -> None:
    """Call before Ray is imported. Its processes inherit the variables. Existing values are kept. Arguments: as in
    `gateway`."""
    for name, value in own_ray(max_body_bytes).items():
        os.environ.setdefault(name, value)
    if is_loopback(gateway_host):
        os.environ.setdefault(*_LOOPBACK_ONLY)
    if _TOKEN_SETTINGS.isdisjoint(os.environ) and not _has_place_for_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # for the lifetime of this cluster


def leave_loopback_addresses(address: str) -> None:
    """Call before Ray is imported. Without the variable, Ray takes the address of the machine's network interface in
    place of a loopback address, and a Ray that `prepare_own_ray` has restricted to loopback does not listen there."""
    if is_loopback(address.rpartition(":")[0].strip("[]")):
        os.environ.setdefault(*_LOOPBACK_ONLY)


def use_own_token(address: str) -> None:
    """Call before Ray is imported. A Ray on this machine asks for the token that it has kept here. Ray itself gives it
    to a cluster that `auto` finds, and to none that is named."""
    is_here = address in local_ray_addresses()
    if is_here and "RAY_AUTH_MODE" not in os.environ and _TOKEN_FILE.expanduser().is_file():
        os.environ["RAY_AUTH_MODE"] = "token"


def local_ray_addresses() -> set[str]:
    """HOST:PORT of each Ray that has a node on this machine, as its processes' arguments tell. Ray's own `auto` finds
    them in the same way."""
    raylets = [one.info["cmdline"] for one in psutil.process_iter(["name", "cmdline"]) if one.info["name"] == "raylet"]
    words = [word for command in raylets for word in command or ()]
    return {word.removeprefix(_GCS_ARGUMENT) for word in words if word.startswith(_GCS_ARGUMENT)}


def _has_place_for_token() -> bool:
    """Ray keeps its token below the home directory, and does not start if it cannot be written."""
    file = _TOKEN_FILE.expanduser()
    return file.is_file() or can_be_made(file.parent)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
