"""Middleware of Serve's HTTP proxy.

The proxy's own plain-text errors (timeout, no replica, queue full) become OpenAI's error objects; the gateway's answers
pass unchanged. Request ids are sanitised first, since the proxy logs and returns whatever a client sends, fails on
invalid UTF-8, and of two ids logs one and returns the other.
"""

from __future__ import annotations

import grpc
import msgspec
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.errors import DeadlineExceeded, Overloaded, Unavailable
from actors.logs import REQUEST_ID_HEADER, request_id_of
from cluster.gateway.errors import ErrorStatus, internal_error, status_of

_RETRY_AFTER_S = 1.0


def middlewares() -> list[Middleware]:
    """Called by Serve's proxy at its start: see `actors.workers.ray_environment`."""
    return [Middleware(ErrorObjects), Middleware(FitRequestIds)]


def proxy_error(status: int, text: str) -> ErrorStatus:
    """The proxy's plain-text error as one of ours."""
    if status == 408:
        return status_of(DeadlineExceeded(text))
    if status == 429:
        return status_of(Overloaded(text, _RETRY_AFTER_S))
    if status == 503:
        return status_of(Unavailable(text))
    if status >= 500:
        return internal_error(status)
    return ErrorStatus(
        http=status, grpc=grpc.StatusCode.UNKNOWN, type="invalid_request_error", code="http_error", message=text
    )


class ErrorObjects:
    """ASGI middleware: turns plain-text answers of status 400 or more into error objects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held: Message | None = None  # start of a plain-text error, until its body is complete
        text = b""

        async def send_on(message: Message) -> None:
            nonlocal held, text
            if message["type"] == "http.response.start" and _is_plain_error(message):
                held = message
            elif held is None:
                await send(message)
            elif message["type"] == "http.response.body":
                text += message.get("body", b"")
                if not message.get("more_body", False):
                    for part in _answer(proxy_error(held["status"], text.decode(errors="replace"))):
                        await send(part)

        await self._app(scope, receive, send_on)


def _is_plain_error(start: Message) -> bool:
    content_type = Headers(raw=start.get("headers", [])).get("content-type", "")
    return start["status"] >= 400 and content_type.startswith("text/plain")


def _answer(error: ErrorStatus) -> tuple[Message, Message]:
    body = msgspec.json.encode(error.body())
    headers = {**error.headers(), "content-type": "application/json", "content-length": str(len(body))}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return (
        {"type": "http.response.start", "status": error.http, "headers": raw},
        {"type": "http.response.body", "body": body},
    )


_NAME = REQUEST_ID_HEADER.encode()
_STEERS_SERVE = b"serve-multiplexed-model-id"  # would choose the replica


class FitRequestIds:
    """ASGI middleware: leaves a call at most one request id, safe to log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            headers, given = [], []
            for name, value in scope["headers"]:
                if name == _NAME:
                    given.append(value)
                elif name.replace(b"_", b"-") != _STEERS_SERVE:
                    headers.append((name, value))
            if given:
                found = request_id_of(given[0].decode("latin-1") if len(given) == 1 else None)
                headers.append((_NAME, found.encode()))
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)
