"""The proxy's end of the Unix sockets on which gateways of its node answer HTTP.

Serve (Ray 2.60) passes a chunk of an answer through two threads and a gRPC message, which costs gateway and proxy more
than all other work on it. So a proxy sends a call to a gateway of its node over a Unix socket, as two frames of
`FrameStream`: head and body. Serve still tells which gateways run, and carries the calls if this node has none.

A Unix socket also connects to a process that hangs. So the gateway first confirms that it takes the call. One that does
not confirm in time gets no calls until it does. gRPC calls go through Serve: before one, the proxy asks each gateway of
the node for a confirmation, unless it has just answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
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

logger = logging.getLogger(__name__)

_through_serve = proxy.HTTPProxy.send_request_to_replica
_grpc_through_serve = proxy.gRPCProxy.send_request_to_replica
_TAKEN_WITHIN_S = 1.0  # limit for a gateway to confirm a call; then the next gateway is asked
_NUM_WAITS = 4  # parts of that time: if this process is held up, only one of them passes
_HEARD_FOR_S = 0.1  # from a gateway, before gRPC calls ask it again
_open_calls: Counter[str] = Counter()  # of this proxy, by gateway
_silent: dict[str, asyncio.Task[None]] = {}  # gateways that have not confirmed in time, and who waits for them
_heard_at: dict[str, float] = {}  # gateways, and when they last answered `_ask`
_asking: dict[str, asyncio.Task[None]] = {}  # gateways that are being asked: calls at the same time share the answer


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
        _forget_queues_of_hanging(handle)
        answer = _through_serve(self, request_id, internal_request_id, handle, proxy_request, app_is_cross_language)
    else:
        timeout_s = _time_limit_s(proxy_request.headers, self.request_timeout_s)
        answer = _answer(*found, proxy_request.scope, proxy_request.receive, request_id, timeout_s)
    async with contextlib.aclosing(answer) as messages:
        async for message in messages:
            yield message


async def send_grpc_request(
    self: Any,
    request_id: str,
    internal_request_id: str,
    handle: Any,
    proxy_request: Any,
    app_is_cross_language: bool = False,
) -> AsyncGenerator[Any, None]:
    """In place of Serve's method, which does not hear for ten seconds that a gateway hangs."""
    await _pass_by_hanging(handle, self._node_id)
    answer = _grpc_through_serve(self, request_id, internal_request_id, handle, proxy_request, app_is_cross_language)
    async with contextlib.aclosing(answer) as messages:
        async for message in messages:
            yield message


async def _pass_by_hanging(handle: Any, node_id: str) -> None:
    now = asyncio.get_running_loop().time()
    here = _gateways_here(handle, node_id)
    unheard = [id for id in here if now - _heard_at.get(id, -math.inf) > _HEARD_FOR_S]
    if unheard:
        for id in _heard_at.keys() - here:  # gone
            del _heard_at[id]
        await asyncio.wait([_answer_to_asking(id) for id in unheard])
    _forget_queues_of_hanging(handle)


def _forget_queues_of_hanging(handle: Any) -> None:
    """Have Serve forget how many calls the hanging gateways of the node have: it asks them, and they do not answer."""
    router = handle._router._asyncio_router._request_router
    if not _silent or router is None:
        return
    loop = handle._router._asyncio_router._event_loop  # in a thread of its own, which alone may change what it knows
    for replica in list(router.curr_replicas.values()):
        if replica.replica_id.unique_id in _silent:
            loop.call_soon_threadsafe(router.on_replica_actor_unavailable, replica.replica_id)


def _answer_to_asking(gateway: str) -> asyncio.Task[None]:
    if gateway not in _asking:
        _asking[gateway] = asyncio.create_task(_ask(gateway))
        _asking[gateway].add_done_callback(lambda _: _asking.pop(gateway))
    return _asking[gateway]


async def _ask(gateway: str) -> None:
    with contextlib.suppress(OSError):
        stream = await _connected(socket_path(gateway))
        if await _takes(gateway, stream):
            stream.abort()
            _heard_at[gateway] = asyncio.get_running_loop().time()


def _time_limit_s(headers: list[tuple[bytes, bytes]], default_s: float | None) -> float | None:
    """As Serve reads it from the headers, which fails on what is no UTF-8; on other text that is no number, it does
    not."""
    try:
        limit_s: float | None = http_util.parse_request_timeout_header(dict(headers), default_s)
    except UnicodeDecodeError:
        return default_s
    return limit_s


def _gateways_here(handle: Any, node_id: str) -> list[str]:
    """Those that run on the node, by Serve's latest news, and do not hang, the least busy first."""
    router = handle._router._asyncio_router._request_router
    replicas = [] if router is None else list(router.curr_replicas.values())  # at once: another thread changes them
    here = [one.replica_id.unique_id for one in replicas if one.node_id == node_id]
    here = [id for id in here if id not in _silent]
    return sorted(here, key=lambda id: _open_calls[id])


async def _connect(gateways: list[str]) -> tuple[str, FrameStream] | None:
    """The first one that takes the call, which counts as one of its open calls."""
    for id in gateways:
        _open_calls[id] += 1
        is_taken = False
        try:
            stream = await _connected(socket_path(id))
            is_taken = await _takes(id, stream)
            if is_taken:
                return id, stream
        except OSError:
            continue
        finally:
            if not is_taken:
                _end_call(id)
    return None


async def _takes(gateway: str, stream: FrameStream) -> bool:
    """Whether the gateway confirms the call in time. Raises ConnectionResetError if it is gone."""
    try:
        for _ in range(_NUM_WAITS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TAKEN_WITHIN_S / _NUM_WAITS):
                    await stream.frame()
                return True
    except BaseException:
        stream.abort()
        raise
    if gateway in _silent:
        stream.abort()
    else:
        logger.warning("gateway %s hangs: calls go to others", gateway)
        _silent[gateway] = asyncio.create_task(_await_return(gateway, stream))
    return False


async def _await_return(gateway: str, stream: FrameStream) -> None:
    try:
        await stream.frame()
    except ConnectionResetError:
        return  # it is gone
    finally:
        stream.abort()
        del _silent[gateway]


def _end_call(gateway: str) -> None:
    _open_calls[gateway] -= 1
    if not _open_calls[gateway]:
        del _open_calls[gateway]  # or those of gateways that are gone would stay


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
        _end_call(gateway)
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
