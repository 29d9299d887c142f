"""Middleware of the HTTP application: ids of requests, keys, and HEAD as GET."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.errors import PacelineError
from actors.logs import REQUEST_ID_HEADER, request_id, request_id_of
from cluster.gateway.door.error_answer import error_answer
from cluster.gateway.door.messages_face import authorization_of
from cluster.gateway.errors import status_of
from cluster.gateway.requests.call import CallOrigin
from cluster.gateway.service import GenerationService


class HeadAsGet:
    """Answers HEAD as GET without the body, on every route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


class WithRequestId:
    """Gives each call an id, the client's or a new one, for its log lines and its answer."""

    def __init__(self, app: ASGIApp, answers: bool) -> None:
        """answers: whether to set the header of the answer."""
        self._app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        found = request_id_of(headers.get(REQUEST_ID_HEADER))
        origin = CallOrigin(found, headers.get("traceparent"), headers.get("tracestate"))
        scope.setdefault("state", {})["origin"] = origin
        request_id.set(found)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = found
            await send(message)

        await self._app(scope, receive, send_with_id if self._answers else send)


class KeyRequired:
    """Requires a key on every path but the open ones, existing or not, before a body is read."""

    def __init__(self, app: ASGIApp, service: GenerationService, open_paths: frozenset[str]) -> None:
        self._app = app
        self._service = service
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                tenant = await self._service.enter(authorization_of(scope["path"], Headers(scope=scope)))
            except PacelineError as error:
                await error_answer(status_of(error))(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)
