"""ASGI middleware of Serve's HTTP proxy that limits the reading of bodies. The proxy itself would read a body of any
size from any client. With tenants, nothing is read without a known key; a body is read only up to the gateway's
limit."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.errors import PacelineError, Size
from cluster.gateway.door.error_answer import error_answer
from cluster.gateway.door.messages_face import authorization_of
from cluster.gateway.door.refusals import count_refusal
from cluster.gateway.errors import BodyTooLarge, status_of
from cluster.tenants.errors import TenantDisabled, Unauthenticated
from cluster.tenants.known_keys import KnownKeys
from cluster.validation import counted

_UNKNOWN_KEY = (b"authorization", b"Bearer unknown")


class LimitBodies:
    def __init__(self, app: ASGIApp, max_bytes: int, keys: KnownKeys | None) -> None:
        """keys: None: no keys are asked for."""
        self._app = app
        self._max_bytes = max_bytes
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if self._keys is not None:
                self._keys.require(authorization_of(scope["path"], headers))
        except Unauthenticated as error:
            # The gateway refuses it, and counts it.
            await self._app(_with_unknown_key(scope) if error.reason == "unknown_key" else scope, _NoBody(), send)
            return
        except TenantDisabled as error:
            await _refuse(error, scope, receive, send)
            return
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await self._refuse_size(counted(int(declared), "byte"), scope, receive, send)
            return
        await self._call_with_limit(scope, receive, send)

    async def _call_with_limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0
        is_started = False

        async def receive_some() -> Message:
            nonlocal size
            if size > self._max_bytes:
                return {"type": "http.disconnect"}
            message = await receive()
            size += len(message.get("body", b""))
            return message if size <= self._max_bytes else {"type": "http.disconnect"}

        async def send_unless_refused(message: Message) -> None:
            nonlocal is_started
            if is_started or size <= self._max_bytes:
                is_started = True
                await send(message)

        await self._app(scope, receive_some, send_unless_refused)
        if size > self._max_bytes and not is_started:
            await self._refuse_size(Size(f"more than {self._max_bytes} bytes"), scope, receive, send)

    async def _refuse_size(self, what: Size, scope: Scope, receive: Receive, send: Send) -> None:
        error = BodyTooLarge("body", what, f"at most {self._max_bytes} bytes are read")
        await _refuse(error, scope, receive, send)


async def _refuse(error: PacelineError, scope: Scope, receive: Receive, send: Send) -> None:
    status = status_of(error)
    count_refusal(status.code)
    await error_answer(status)(scope, receive, send)


class _NoBody:
    """Receives an empty body in place of what the client sends."""

    def __init__(self) -> None:
        self._is_over = False

    async def __call__(self) -> Message:
        if self._is_over:
            await asyncio.Event().wait()  # cancelled with the call
        self._is_over = True
        return {"type": "http.request", "body": b"", "more_body": False}


def _with_unknown_key(scope: Scope) -> Scope:
    """The gateway may know the key already: on its node the registry may be newer. Without the body it would blame the
    client for that."""
    others = [(name, value) for name, value in scope["headers"] if name != b"authorization"]
    return {**scope, "headers": [*others, _UNKNOWN_KEY]}
