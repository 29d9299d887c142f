"""Middleware of Serve's HTTP proxy.

The proxy's own plain-text errors (timeout, no replica, queue full, a lost gateway) become OpenAI's error objects; the
gateway's answers pass unchanged. Request ids are sanitised first, since the proxy logs and returns whatever a client
sends, fails on invalid UTF-8, and of two ids logs one and returns the other.
"""

from __future__ import annotations

import logging

import grpc
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.errors import DeadlineExceeded, Overloaded, Unavailable
from actors.logs import REQUEST_ID_HEADER, request_id_of
from cluster.gateway.door import front_door
from cluster.gateway.door.error_answer import error_answer, error_event
from cluster.gateway.door.hosts import PROBE_PATHS
from cluster.gateway.door.refusals import count_refusal
from cluster.gateway.door.request_bodies import LimitBodies
from cluster.gateway.errors import ErrorStatus, NoClientCertificate, internal_error, status_of

logger = logging.getLogger(__name__)

_SERVE_PROBE = "/-/healthz"  # says "success"
_RETRY_AFTER_S = 1.0
_BROKEN = "the answer broke off before its end; the same call may be sent again"


def middlewares() -> list[Middleware]:
    """Called by Serve's proxy before it listens: see `actors.workers.ray_environment`. A request meets the last one
    first."""
    door = front_door.current()
    return [
        Middleware(ErrorObjects),
        Middleware(LimitBodies, max_bytes=door.max_body_bytes, keys=door.known_keys()),
        Middleware(ClosedRoutes, needs_certificate=door.tls.client_ca_file is not None),
        Middleware(FitRequestIds),
    ]


def proxy_error(status: int, text: str) -> ErrorStatus:
    """The proxy's plain-text error as one of ours."""
    if status == 408:
        return status_of(DeadlineExceeded(text))
    if status == 429:
        return status_of(Overloaded(text, _RETRY_AFTER_S))
    if status == 503:
        return status_of(Unavailable(text))
    if status == 404:  # the gateway's own are no plain text
        return status_of(Unavailable("the server is starting"))
    if status >= 500:
        return internal_error(status)
    return ErrorStatus.of_http(status, "http_error", text)


class ErrorObjects:
    """ASGI middleware: plain-text answers of status 400 or more become error objects, and so does an answer that does
    not come. A stream of events that breaks off ends with an error."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            logger.exception("the proxy failed")
        if answer.plain_error is not None:
            await error_answer(proxy_error(*answer.plain_error))(scope, receive, send)
        elif not answer.is_started:
            await error_answer(internal_error(500))(scope, receive, send)
        elif answer.is_broken_stream:
            event = error_event(status_of(Unavailable(_BROKEN)), scope["path"])
            await send({"type": "http.response.body", "body": event})


class _Answer:
    """Passes an answer on, except for a plain-text error, which it keeps."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.plain_error: tuple[int, str] | None = None  # status and text
        self.is_started = False
        self._is_stream = False
        self._is_over = False

    @property
    def is_broken_stream(self) -> bool:
        return self._is_stream and not self._is_over

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            content_type = Headers(raw=message.get("headers", [])).get("content-type", "")
            self._is_stream = content_type.startswith("text/event-stream")
            if message["status"] >= 400 and content_type.startswith("text/plain"):
                self.plain_error = message["status"], ""
        elif message["type"] == "http.response.body":
            self._is_over = not message.get("more_body", False)
        if self.plain_error is None:
            await self._send(message)
        elif message["type"] == "http.response.body":
            status, text = self.plain_error
            self.plain_error = status, text + message.get("body", b"").decode(errors="replace")


class ClosedRoutes:
    """ASGI middleware that closes Serve's own routes, except the one that KubeRay probes, and request targets that are
    not paths, such as "*". With `needs_certificate`, clients without a certificate reach only probes."""

    def __init__(self, app: ASGIApp, needs_certificate: bool) -> None:
        self._app = app
        self._needs_certificate = needs_certificate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if (path.startswith("/-/") and path != _SERVE_PROBE) or not path.startswith("/"):
                await error_answer(_not_found(path))(scope, receive, send)
                return
            is_probe = path in PROBE_PATHS or path == _SERVE_PROBE
            if self._needs_certificate and not is_probe and not scope.get("state", {}).get("has_client_certificate"):
                status = status_of(NoClientCertificate())
                count_refusal(status.code)
                await error_answer(status)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _not_found(path: str) -> ErrorStatus:
    return ErrorStatus(
        http=404,
        grpc=grpc.StatusCode.NOT_FOUND,
        type="invalid_request_error",
        code="not_found",
        message=f"there is no {path!r} here",
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
