"""Web pages of other origins. What a page may send without asking (a form's types of body, or none) is refused, so a
browser asks first, and CORS answers for the configured origins alone."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.logs import REQUEST_ID_HEADER
from cluster.config import GatewayConfig
from cluster.gateway.door.error_answer import error_answer
from cluster.gateway.errors import NotJson, status_of


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
                    ", ".join(given) or None,
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
