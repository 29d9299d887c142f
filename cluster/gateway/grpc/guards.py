"""Our gRPC services as Serve's proxy gets them. Where keys are asked for, only a caller with a known key has
its message read. Calls have limits (`open_calls`). Bytes that are no message reach the handler as `Unreadable` instead
of failing with Python's own words."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from actors.errors import DeadlineExceeded, Overloaded
from cluster.gateway.door.refusals import count_refusal
from cluster.gateway.errors import ErrorStatus, status_of
from cluster.gateway.grpc.open_calls import OpenCalls, time_for_message
from cluster.tenants.errors import TenantDisabled, Unauthenticated
from cluster.tenants.known_keys import KnownKeys


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Bytes that are not the message which the method takes."""


class Registration:
    """Stands before a server while generated code adds a service to it."""

    def __init__(
        self, server: Any, keys: KnownKeys | None, calls: OpenCalls, brief_calls: OpenCalls | None = None
    ) -> None:
        """keys: None: no keys are asked for. calls, brief_calls: as of `GuardedService`."""
        self._server = server
        self._guards = keys, calls, brief_calls

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        service = GuardedService(handlers[0], *self._guards)
        service._method_handlers = {name: _tolerant(method) for name, method in service._method_handlers.items()}
        self._server.add_generic_rpc_handlers((service,))

    def add_registered_method_handlers(self, name: str, methods: Mapping[str, grpc.RpcMethodHandler]) -> None:
        """Left out: they would come before the generic ones, which alone see the metadata before the message."""


class GuardedService(grpc.ServiceRpcHandler):
    """Serve's server puts its own handlers into `_method_handlers`."""

    def __init__(
        self, service: Any, keys: KnownKeys | None, calls: OpenCalls, brief_calls: OpenCalls | None = None
    ) -> None:
        """service: as generated code makes it. brief_calls: those that are not answered with a stream; None: they are
        among `calls`."""
        self._name = service.service_name()
        self._method_handlers: dict[str, grpc.RpcMethodHandler] = service._method_handlers
        self._keys = keys
        self._calls = calls
        self._brief_calls = brief_calls or calls

    def service_name(self) -> str:
        return str(self._name)

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = self._method_handlers.get(call.method)
        if method is None:
            return None
        try:
            if self._keys is not None:
                self._keys.require(value for name, value in call.invocation_metadata or () if name == "authorization")
        except (Unauthenticated, TenantDisabled) as error:
            return _refusal(error)
        return _limited(method, self._calls if method.response_streaming else self._brief_calls)


def _refusal(error: Exception) -> grpc.RpcMethodHandler:
    async def refuse(requests: Any, context: Any) -> None:
        await _abort(context, error)

    # As if the client streamed: a handler of one message would get it first.
    return grpc.stream_unary_rpc_method_handler(refuse)


def _limited(method: Any, calls: OpenCalls) -> grpc.RpcMethodHandler:
    """The method as if its client streamed, so that the wait for its message is ours."""

    async def answer(requests: AsyncIterator[Any], context: Any) -> Any:
        async with _place(calls, context):
            return await method.unary_unary(await _only(requests), context)

    async def answer_with_stream(requests: AsyncIterator[Any], context: Any) -> None:
        async with _place(calls, context):
            await method.unary_stream(await _only(requests), context)

    async def converse(requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
        async with _place(calls, context), time_for_message():
            async for message in method.stream_stream(requests, context):
                yield message

    read, written = method.request_deserializer, method.response_serializer
    if method.request_streaming:
        return grpc.stream_stream_rpc_method_handler(converse, read, written)
    if method.response_streaming:
        return grpc.stream_stream_rpc_method_handler(answer_with_stream, read, written)
    return grpc.stream_unary_rpc_method_handler(answer, read, written)


async def _only(requests: AsyncIterator[Any]) -> Any:
    """Raises DeadlineExceeded."""
    async with time_for_message():
        return await anext(requests, Unreadable())


@asynccontextmanager
async def _place(calls: OpenCalls, context: Any) -> AsyncIterator[None]:
    try:
        with calls.place():
            yield
    except (Overloaded, DeadlineExceeded) as error:
        await _abort(context, error)


async def _abort(context: Any, error: Exception) -> None:
    status: ErrorStatus = status_of(error)
    count_refusal(status.code)
    await context.abort(status.grpc, status.message, tuple(status.trailing_metadata()))


def _tolerant(method: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    read: Callable[[bytes], Any] = method.request_deserializer

    def read_or_tell(message: bytes) -> Any:
        try:
            return read(message)
        except DecodeError:
            return Unreadable()

    replaced: grpc.RpcMethodHandler = method._replace(request_deserializer=read_or_tell)
    return replaced
