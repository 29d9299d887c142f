"""The gateway's end of the socket on which the proxy of its node asks: see `cluster.gateway.door.gateway_sockets`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
from starlette.types import ASGIApp, Message, Scope

from cluster.gateway.door.frame_stream import FrameStream

logger = logging.getLogger(__name__)

_MOST_WAITING = 4096  # connections that are not accepted yet; the system has its own limit
_ACCEPTED_WITHIN_S = 0.1  # a connection that is not when the socket closes would be lost


class SocketListener:
    """Answers each connection with one call of the application. Its loss cancels the call."""

    def __init__(self, app: ASGIApp, path: Path) -> None:
        self._app = app
        self._path = path
        self._calls: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None

    async def open(self) -> None:
        """Raises OSError, for a path that is too long, too."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: FrameStream(self._begin), str(self._path), backlog=_MOST_WAITING
        )
        self._path.chmod(0o600)

    async def close(self) -> None:
        """Takes no more calls, and returns when those that are open have ended."""
        if self._server is not None:
            self._path.unlink(missing_ok=True)
            await asyncio.sleep(_ACCEPTED_WITHIN_S)
            self._server.close()
        while self._calls:
            await asyncio.wait(self._calls)

    def _begin(self, stream: FrameStream) -> None:
        exchange = _Exchange(stream)
        call = asyncio.create_task(self._answer(stream, exchange))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        stream.call_when_lost(lambda: None if exchange.is_answered else call.cancel())

    async def _answer(self, stream: FrameStream, exchange: _Exchange) -> None:
        try:
            await self._call(stream, exchange)
            if exchange.is_answered:
                await stream.lost()  # the proxy has read it to its end
        finally:
            stream.close()

    async def _call(self, stream: FrameStream, exchange: _Exchange) -> None:
        try:
            await stream.send(b"")  # confirms that the call is taken
            await self._app(_scope_of(await stream.frame()), exchange.receive, exchange.send)
        except ConnectionResetError:
            return  # nobody waits for it
        except Exception:  # that comes after an answer, too: FastAPI answers it, and raises it then
            logger.exception("a call failed")


class _Exchange:
    """ASGI's `receive` and `send` of one call."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._has_body = False  # all of it
        self.is_answered = False  # to the end

    async def receive(self) -> Message:
        if self._has_body:
            await self._stream.lost()
            return {"type": "http.disconnect"}
        frames = await self._stream.frames()
        self._has_body = frames[-1] == b""
        return {"type": "http.request", "body": b"".join(frames), "more_body": not self._has_body}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._stream.send(msgspec.msgpack.encode((message["status"], message["headers"])))
            return
        if body := message.get("body", b""):
            await self._stream.send(body)
        if not message.get("more_body", False):
            self.is_answered = True
            await self._stream.send(b"")


def _scope_of(head: bytes) -> Scope:
    scope: Scope = msgspec.msgpack.decode(head)
    scope["headers"] = [tuple(header) for header in scope["headers"]]
    for end in ("client", "server"):
        scope[end] = scope.get(end) and tuple(scope[end])
    scope["asgi"]["spec_version"] = "2.4"  # `send` raises OSError when the connection is lost: nobody has to watch it
    return scope
