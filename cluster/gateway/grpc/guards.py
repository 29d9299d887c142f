"""Our gRPC services as Serve's proxy gets them. Where keys are asked for, only a caller with a known key has
its message read. Bytes that are no message reach the handler as `Unreadable` instead of failing with Python's own
words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cluster.gateway.door.refusals import count_refusal
from cluster.gateway.errors import status_of
from cluster.tenants.errors import TenantDisabled, Unauthenticated
from cluster.tenants.known_keys import KnownKeys


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Bytes that are not the message which the method takes."""


class Registration:
    """Stands before a server while generated code adds a service to it."""

    def __init__(self, server: Any, keys: KnownKeys | None) -> None:
        """keys: None: no keys are asked for."""
        self._server = server
        self._keys = keys

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        service = handlers[0]
        methods = {name: _tolerant(method) for name, method in service._method_handlers.items()}
        self._server.add_generic_rpc_handlers((_Service(service.service_name(), methods, self._keys),))

    def add_registered_method_handlers(self, name: str, methods: Mapping[str, grpc.RpcMethodHandler]) -> None:
        """Left out: they would come before the generic ones, which alone see the metadata before the message."""


class _Service(grpc.ServiceRpcHandler):
    """Serve's server puts its own handlers into `_method_handlers`."""

    def __init__(self, name: str, methods: dict[str, grpc.RpcMethodHandler], keys: KnownKeys | None) -> None:
        self._name = name
        self._method_handlers = methods
        self._keys = keys

    def service_name(self) -> str:
        return self._name

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        method = self._method_handlers.get(call.method)
        if method is None or self._keys is None:
            return method
        try:
            self._keys.require(value for name, value in call.invocation_metadata or () if name == "authorization")
        except (Unauthenticated, TenantDisabled) as error:
            return _refusal(error)
        return method


def _refusal(error: Exception) -> grpc.RpcMethodHandler:
    status = status_of(error)

    count_refusal(status.code)

    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(status.grpc, status.message)

    # As if the client streamed: a handler of one message would get it first.
    return grpc.stream_unary_rpc_method_handler(refuse)


def _tolerant(method: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    read: Callable[[bytes], Any] = method.request_deserializer

    def read_or_tell(message: bytes) -> Any:
        try:
            return read(message)
        except DecodeError:
            return Unreadable()

    replaced: grpc.RpcMethodHandler = method._replace(request_deserializer=read_or_tell)
    return replaced
