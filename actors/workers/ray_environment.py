"""Environment variables for a Ray started by Paceline. Ray reads them on import, so it is not imported here."""

from __future__ import annotations

import ipaddress
import os
import secrets
from pathlib import Path

from actors.workers.kernel_cache import can_be_made

OWN_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "cluster.gateway.proxy_errors.middlewares",
}

_TOKEN_SETTINGS = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}


def prepare_own_ray(gateway_host: str) -> None:
    """Call before Ray is imported. Its processes inherit the variables. Existing values are kept."""
    for name, value in OWN_RAY.items():
        os.environ.setdefault(name, value)
    if is_loopback(gateway_host):
        # As Ray does on macOS: a single machine, all ports listen on loopback.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if _TOKEN_SETTINGS.isdisjoint(os.environ) and not _has_place_for_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # for the lifetime of this cluster


def _has_place_for_token() -> bool:
    """Ray keeps its token below the home directory, and does not start if it cannot be written."""
    folder = Path("~/.ray").expanduser()
    return (folder / "auth_token").is_file() or can_be_made(folder)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
