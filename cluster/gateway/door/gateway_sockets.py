"""The proxy's end of the sockets on which gateways of its node answer HTTP.

Serve (Ray 2.60) takes a chunk of an answer through two threads and a gRPC message, which costs gateway and proxy more
than all that they do with it. So a proxy asks a gateway of its own node over a Unix socket: the call as two messages of
`FrameStream`, a head and a body each. Serve still tells which gateways run, and carries calls where none is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.serve._private import http_util, proxy
from ray.serve._private.proxy_request_response import ResponseStatus
from starlette.types import Message, Receive, Scope

from cluster.gateway.door import proxy_status
from cluster.gateway.door.frame_stream import FrameStream

_through_serve = proxy.HTTPProxy.send_request_to_replica
_open_calls: Counter[str] = Counter()  # of this proxy, by gateway


def socket_path(replica_id: str) -> Path:
    """Where the gateway that is this replica listens."""
    return Path(ray.get_runtime_context().worker.node.get_session_dir_path(), "sockets", f"gw-{replica_id}")


async def send_request(
    self: Any,
    request_id: str,
    internal_request_id: str,
    handle: Any,
    proxy_request: Any,
    app_is_cross_language: bool = False,
) -> AsyncGenerator[Message | ResponseStatus, None]:
    """In place of Serve's method: ASGI messages of the answer, then its status."""
    found = None
    if proxy_request.request_type == "http":
        found = await _connect(_gateways_here(handle, self._node_id))
    if found is None:
        answer = _through_serve(self, request_id, internal_request_id, handle, proxy_request, app_is_cross_language)
    else:
        timeout_s = _time_limit_s(proxy_request.headers, self.request_timeout_s)
        answer = _answer(*found, proxy_request.scope, proxy_request.receive, request_id, timeout_s)
    async with contextlib.aclosing(answer) as messages:
        async for message in messages:
            yield message


def _time_limit_s(headers: list[tuple[bytes, bytes]], default_s: float | None) -> float | None:
    """As Serve reads it from the headers, which fails on what is no UTF-8; on other text that is no number, it does
    not."""
    try:
        limit_s: float | None = http_util.parse_request_timeout_header(dict(headers), default_s)
    except UnicodeDecodeError:
        return default_s
    return limit_s


def _gateways_here(handle: Any, node_id: str) -> list[str]:
    """Those that run on the node, by Serve's latest news, the least busy first."""
    router = handle._router._asyncio_router._request_router
    replicas = [] if router is None else list(router.curr_replicas.values())  # at once: another thread changes them
    here = [one.replica_id.unique_id for one in replicas if one.node_id == node_id]
    return sorted(here, key=lambda id: _open_calls[id])


async def _connect(gateways: list[str]) -> tuple[str, FrameStream] | None:
    for id in gateways:
        with contextlib.suppress(OSError):
            return id, await _connected(socket_path(id))
    return None


async def _connected(path: Path) -> FrameStream:
    """Raises OSError where it cannot be done at once."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect(str(path))
        _, stream = await asyncio.get_running_loop().create_unix_connection(FrameStream, sock=connection)
    except BaseException:
        connection.close()
        raise
    return stream


async def _answer(
    gateway: str, stream: FrameStream, scope: Scope, receive: Receive, request_id: str, timeout_s: float | None
) -> AsyncGenerator[Message | ResponseStatus, None]:
    _open_calls[gateway] += 1
    forwarding = asyncio.create_task(_forward(scope, receive, stream))
    timer = None
    if timeout_s is not None:
        timer = asyncio.get_running_loop().call_later(timeout_s, stream.fail, TimeoutError())
    status = None
    try:
        code, headers = msgspec.msgpack.decode(await stream.frame())
        status = ResponseStatus(code=str(code), is_error=code >= 400)
        yield {"type": "http.response.start", "status": code, "headers": headers}
        has_more = True
        while has_more:
            frames = await stream.frames()
            has_more = frames[-1] != b""
            yield {"type": "http.response.body", "body": b"".join(frames), "more_body": has_more}
    except (Exception, asyncio.CancelledError) as error:
        failure = proxy_status.http_status(error, timeout_s, request_id)
        for message in http_util.send_http_response_on_exception(failure, response_started=status is not None):
            yield message
        status = status or failure
    finally:
        _open_calls[gateway] -= 1
        if not _open_calls[gateway]:
            del _open_calls[gateway]  # or those of gateways that are gone would stay
        forwarding.cancel()
        if timer is not None:
            timer.cancel()
        stream.abort()
    yield status


async def _forward(scope: Scope, receive: Receive, stream: FrameStream) -> None:
    """The call, then the news that the client is gone."""
    try:
        await stream.send(msgspec.msgpack.encode({name: scope[name] for name in scope if name != "state"}))
        while (message := await receive())["type"] == "http.request":
            if body := message.get("body", b""):
                await stream.send(body)
            if not message.get("more_body", False):
                await stream.send(b"")
        stream.fail(asyncio.CancelledError())
    except ConnectionResetError:
        return  # whoever reads the answer hears of it
    except Exception as error:
        stream.fail(error)
