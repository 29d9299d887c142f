"""The status of calls that fail in Serve's proxy itself, in place of Serve's own: without Ray's class names and actor
ids, and without a traceback in the log for what happens in every cluster: a gateway is lost."""

from __future__ import annotations

import grpc
from ray.exceptions import RayActorError
from ray.serve._private.grpc_util import get_grpc_response_status
from ray.serve._private.http_util import get_http_response_status
from ray.serve._private.proxy_request_response import ResponseStatus

LOST = "the gateway that answered was lost; the same call may be sent again"


def http_status(error: BaseException, request_timeout_s: float | None, request_id: str) -> ResponseStatus:
    if _is_lost(error):
        return ResponseStatus(code=503, is_error=True, message=LOST)
    return get_http_response_status(error, request_timeout_s, request_id)


def grpc_status(error: BaseException, request_timeout_s: float | None, request_id: str) -> ResponseStatus:
    if _is_lost(error):
        return ResponseStatus(code=grpc.StatusCode.UNAVAILABLE, is_error=True, message=LOST)
    status = get_grpc_response_status(error, request_timeout_s, request_id)
    if status.code is grpc.StatusCode.INTERNAL:
        return ResponseStatus(code=status.code, is_error=True, message="internal error")
    return status


def _is_lost(error: BaseException) -> bool:
    return isinstance(error, (RayActorError, grpc.RpcError, ConnectionResetError))
