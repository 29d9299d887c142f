"""Registers our gRPC services with Serve's proxies, and adds what the proxy (Ray 2.60) lacks.

- It has no limits, and listens on every interface. So its options carry settings, which `front_door` applies in the
  proxy's process.
- A replica does not receive a call's deadline. So the remaining time is written into the request's `timeout_s`, where
  the gateway and the router read it.
- A stream that is cancelled while a message is being written is forgotten, and its replica generates to the end. So
  the proxy's handler runs in a separate task, which is cancelled when writing ends for any reason.
- A replica's context reaches the proxy only with a message, so a failing stream would lose its trailing metadata. So it
  ends with an empty message (`Gateway.GenerateStream`), which is dropped here.
- The proxy's own refusals (no replica, queue full) have no retry time. So ours is added.
- The number of calls, and their wait for clients, are unlimited. So `open_calls` limits both, also for reflection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import grpc
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from ray.serve._private import grpc_util
from ray.serve.config import gRPCOptions

from cluster.gateway.door.front_door import FrontDoor, current, install
from cluster.gateway.errors import UNAVAILABLE_RETRY_AFTER_S, grpc_retry_metadata
from cluster.gateway.grpc.guards import GuardedService, Registration, Unreadable
from cluster.gateway.grpc.open_calls import KEYLESS_CALLS, OpenCalls, time_for_reading
from cluster.gateway.paceline.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from cluster.tenants.known_keys import KnownKeys

_SERVE_METHOD = "ray.serve.RayServeAPIService"
_MIN_TIMEOUT_S = 0.001
_END = object()
_serve_reflection = grpc_util.enable_server_reflection

Add = Callable[[Any, Any], None]  # generated code has no types


class HostedGrpcOptions(gRPCOptions):
    """Serve's options with those of `front_door`. They count in every process that unpickles them: the proxies."""

    front_door: FrontDoor

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        install(self.front_door)


def add_inference(servicer: Any, server: Any) -> None:
    door = current()
    _add(add_InferenceServicer_to_server, servicer, server, door.known_keys(), OpenCalls(door.max_connections))


def add_health(servicer: Any, server: Any) -> None:
    # Watchers stay for as long as they like, and must not keep probes out.
    calls = OpenCalls(KEYLESS_CALLS), OpenCalls(KEYLESS_CALLS)
    _add(add_HealthServicer_to_server, servicer, server, None, *calls)


def _add(
    add: Add,
    servicer: Any,
    server: Any,
    keys: KnownKeys | None,
    calls: OpenCalls,
    brief_calls: OpenCalls | None = None,
) -> None:
    """Serve's server replaces each handler by one from its factory; meanwhile the factory is ours."""
    factory = getattr(server, "service_handler_factory", None)
    if factory is None:  # a plain gRPC server has neither defect
        add(servicer, server)
        return
    server.service_handler_factory = partial(_make_handler, factory)
    try:
        add(servicer, Registration(server, keys, calls, brief_calls))
    finally:
        server.service_handler_factory = factory
    grpc_util.enable_server_reflection = _enable_reflection  # comes after all services


def _make_handler(factory: Callable[..., Any], service_method: str, streaming_type: str) -> Callable[..., Any]:
    handler = factory(service_method=service_method, streaming_type=streaming_type)
    if streaming_type == "unary_unary":

        async def unary(request: Any, context: Any) -> Any:
            if isinstance(request, Unreadable):
                _refuse_unreadable(context)
                return b""
            _note_deadline(request, context)
            answer = await handler(request, context)
            _note_start(context)
            _note_retry_time(context)
            return answer

        return unary
    if streaming_type == "unary_stream":

        async def stream(request: Any, context: Any) -> None:
            if isinstance(request, Unreadable):
                _refuse_unreadable(context)
                return
            _note_deadline(request, context)
            # Not bounded, so that the task only ever waits where a cancellation reaches the replica. An answer's
            # length bounds it, and Ray's own stream behind it holds as much. A client that takes none loses it all.
            messages: asyncio.Queue[Any] = asyncio.Queue()
            task = asyncio.create_task(_pump(handler(request, context), context, messages))
            try:
                while (message := await messages.get()) is not _END:
                    async with time_for_reading():
                        await context.write(message)
                await task  # its error, if it had one
                _note_start(context)
                _note_retry_time(context)
            finally:
                # The task uses the context to its end, and the context does not outlive this coroutine.
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        return stream
    return handler


def _enable_reflection(server: Any) -> None:
    """In place of Serve's function. A call of reflection lasts at most as long as others may wait for their message."""
    calls = OpenCalls(KEYLESS_CALLS)
    add = server.add_generic_rpc_handlers
    server.add_generic_rpc_handlers = lambda handlers: add((GuardedService(handlers[0], None, calls),))
    server.add_registered_method_handlers = lambda name, methods: None  # as in `Registration`
    try:
        _serve_reflection(server)
    finally:
        del server.add_generic_rpc_handlers, server.add_registered_method_handlers


async def _pump(source: AsyncGenerator[Any, None], context: Any, messages: asyncio.Queue[Any]) -> None:
    try:
        async for message in source:
            if not context.code():  # else it came with that message, which is empty
                messages.put_nowait(message)
    finally:
        messages.put_nowait(_END)


def _note_deadline(request: Any, context: Any) -> None:
    remaining_s = context.time_remaining()
    if remaining_s is None or "timeout_s" not in request.DESCRIPTOR.fields_by_name:
        return
    if not request.HasField("timeout_s") or remaining_s < request.timeout_s:
        request.timeout_s = max(_MIN_TIMEOUT_S, remaining_s)


def _refuse_unreadable(context: Any) -> None:
    context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
    context.set_details("the message is not of the type that this method takes")


def _note_start(context: Any) -> None:
    """Serve's proxy answers NOT_FOUND, naming a method that is closed here, while there is no application."""
    if context.code() is grpc.StatusCode.NOT_FOUND and _SERVE_METHOD in (context.details() or ""):
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details("the server is starting")


def _note_retry_time(context: Any) -> None:
    """Leaves a time that is there already: the replica knows more."""
    metadata = tuple(context.trailing_metadata() or ())
    retry = grpc_retry_metadata(UNAVAILABLE_RETRY_AFTER_S)
    known = any(key == retry[0] for key, _ in metadata)
    if context.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE) and not known:
        context.set_trailing_metadata((*metadata, retry))
