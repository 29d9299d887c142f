"""Web pages of other origins. What a page may send without asking (a form's types of body, or none) is refused, so a
browser asks first, and CORS answers for the configured origins alone."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.errors import MISSING
from actors.logs import REQUEST_ID_HEADER
from cluster.gateway.door.error_answer import error_answer
from cluster.gateway.door.hosts import PROBE_PATHS
from cluster.gateway.errors import NotJson, OriginNotAllowed, status_of
from cluster.gateway_config import GatewayConfig


def cors(config: GatewayConfig) -> list[Middleware]:
    """Empty without origins: browsers then keep answers from pages of others."""
    if not config.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # clients' libraries add headers of their own
            allow_private_network=True,  # a public page to a server on this machine or network
            expose_headers=(REQUEST_ID_HEADER, "retry-after", "x-should-retry"),
        )
    ]


class OriginRequired:
    """ASGI middleware: refuses what pages of other origins send, except probes. What is no browser names no origin."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        """allowed: origins besides the server's own; "*": any."""
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PROBE_PATHS:
            headers = Headers(scope=scope)
            given = headers.getlist("origin")
            if given and not (len(given) == 1 and self._is_allowed(given[0], headers.get("host", ""))):
                limit = "only pages of this server may call it, and those of gateway.cors_origins"
                error = OriginNotAllowed("Origin", ", ".join(given), limit)
                await error_answer(status_of(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, origin: str, host: str) -> bool:
        if origin in self._allowed or "*" in self._allowed:
            return True
        scheme, _, authority = origin.partition("://")
        return scheme in ("http", "https") and authority.lower() == host.lower()


class JsonRequired:
    """ASGI middleware: a POST must say that its body is JSON, before the body is read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = Headers(scope=scope)
            given = headers.getlist("content-type")
            if _has_body(headers) and (len(given) != 1 or not _is_json(given[0])):
                error = NotJson(
                    "Content-Type",
                    ", ".join(given) or MISSING,
                    "it must be application/json; with curl: -H 'Content-Type: application/json'",
                )
                await error_answer(status_of(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
