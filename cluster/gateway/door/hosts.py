"""Which names the server answers to. A web page can make a name of its own point at a loopback address (DNS rebinding);
its requests then count as same-origin, but carry that name in the Host header."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.workers.ray_environment import is_loopback
from cluster.gateway.door.error_answer import error_answer
from cluster.gateway.errors import HostNotAllowed, status_of

PROBE_PATHS = frozenset(("/livez", "/readyz", "/health"))  # Kubernetes asks by address
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def allowed_hosts(allowed: Sequence[str] | None, host: str) -> tuple[str, ...]:
    """Names to answer to; empty: any. allowed: `gateway.allowed_hosts`. host: address that is listened on.

    A server on a loopback address is reached under few names. One that others reach has names that it cannot know, of
    Kubernetes services for example. With tenants it asks for keys, which a foreign web page does not have. With
    `tenants.open` nothing keeps such a page out but a list of names.
    """
    names: tuple[str, ...]
    if allowed is None:
        names = (*_LOOPBACK_NAMES, host) if is_loopback(host) else ()
    else:
        names = () if "*" in allowed else tuple(allowed)
    return tuple(dict.fromkeys(name.lower().strip("[]") for name in names))


class HostRequired:
    """ASGI middleware: refuses requests for other hosts, except of probes."""

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...]) -> None:
        """allowed: as `allowed_hosts` returns them."""
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._allowed and scope["path"] not in PROBE_PATHS:
            given = Headers(scope=scope).getlist("host")
            name = host_name(given[0]) if len(given) == 1 else ""
            if not _is_allowed(name, self._allowed):
                limit = f"this server answers to {', '.join(self._allowed)} (gateway.allowed_hosts)"
                error = HostNotAllowed("Host", ", ".join(given), limit)
                await error_answer(status_of(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def host_name(header: str) -> str:
    """Lower case, without port and without the brackets of an IPv6 address."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].removesuffix(".")


def _is_allowed(name: str, allowed: Iterable[str]) -> bool:
    return any(name == one or (one.startswith("*.") and name.endswith(one[1:])) for one in allowed)
