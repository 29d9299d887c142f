"""Registers our gRPC services with Serve's proxies, and carries the callers' deadlines across them.

Serve's proxy hands a replica neither the deadline of a call nor the means to ask for it; it only cancels the replica's
task once the deadline has passed. So the time that is left when a call arrives is written into the request's own
`timeout_s`, where the gateway and the router see it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from cluster.gateway.paceline.v1.inference_pb2_grpc import add_InferenceServicer_to_server

SERVICER_FUNCTIONS = (
    "cluster.gateway.grpc_registration.add_inference",
    "cluster.gateway.grpc_registration.add_health",
)

_MIN_TIMEOUT_S = 0.001


def add_health(servicer: Any, server: Any) -> None:
    add_HealthServicer_to_server(servicer, server)


_add_inference: Callable[[Any, Any], None] = add_InferenceServicer_to_server  # generated code has no types


def add_inference(servicer: Any, server: Any) -> None:
    """`server` is Serve's: it replaces each handler by one of its factory, which is wrapped here meanwhile."""
    factory = getattr(server, "service_handler_factory", None)
    if factory is None:  # a plain gRPC server, or a Serve that does it another way: then cancellation has to do
        _add_inference(servicer, server)
        return
    server.service_handler_factory = partial(_handler_with_deadline, factory)
    try:
        _add_inference(servicer, server)
    finally:
        server.service_handler_factory = factory


def _handler_with_deadline(factory: Callable[..., Any], service_method: str, streaming_type: str) -> Callable[..., Any]:
    handler = factory(service_method=service_method, streaming_type=streaming_type)
    if streaming_type == "unary_unary":

        async def unary(request: Any, context: Any) -> Any:
            _note_deadline(request, context)
            return await handler(request, context)

        return unary
    if streaming_type == "unary_stream":

        async def stream(request: Any, context: Any) -> Any:
            _note_deadline(request, context)
            async for message in handler(request, context):
                yield message

        return stream
    return handler


def _note_deadline(request: Any, context: Any) -> None:
    remaining_s = context.time_remaining()
    if remaining_s is None or "timeout_s" not in request.DESCRIPTOR.fields_by_name:
        return
    if not request.HasField("timeout_s") or remaining_s < request.timeout_s:
        request.timeout_s = max(_MIN_TIMEOUT_S, remaining_s)
