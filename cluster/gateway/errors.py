"""Errors of the gateway, and the table of HTTP and gRPC status for all errors.

Errors of tenants are in `cluster.tenants.errors`, those of routers and workers in `actors.errors`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import grpc
from ray.exceptions import RayTaskError

from actors.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LinkError,
    ObjectiveUnreachable,
    Overloaded,
    PacelineError,
    Unavailable,
)
from cluster.tenants.errors import OverLimit, TenantDisabled, Unauthenticated


class ModelNotFound(InvalidRequest):
    """The call names a model that is not served here."""


class BodyTooLarge(InvalidRequest):
    """The call is larger than the gateway reads."""


class UnknownEncoding(InvalidRequest):
    """The body of the call is compressed in a way that the gateway does not read."""


class HostNotAllowed(InvalidRequest):
    """The Host header names a host that this server does not answer to."""


class OriginNotAllowed(InvalidRequest):
    """The call comes from a web page of an origin that is not allowed."""


class NoClientCertificate(PacelineError):
    """The client has not shown a certificate, which `gateway.tls` asks for."""

    def __str__(self) -> str:
        return "a client certificate is required (gateway.tls.client_ca_file)"


class MetricsElsewhere(PacelineError):
    """/metrics is not on the public port. The message says where it is."""


class NotJson(InvalidRequest):
    """The call does not say that its body is JSON."""


def grpc_retry_metadata(retry_after_s: float) -> tuple[str, str]:
    """The delay before a retry, under the key that gRPC clients with a retry policy read."""
    return "grpc-retry-pushback-ms", str(math.ceil(1000 * retry_after_s))


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """How a client sees an error."""

    http: int
    grpc: grpc.StatusCode
    type: str  # OpenAI's error type
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    retry_helps: bool | None = None  # None: the client decides by the status

    @classmethod
    def of_http(cls, status: int, code: str, message: str) -> ErrorStatus:
        """A client's error that only HTTP has."""
        return cls(http=status, grpc=grpc.StatusCode.UNKNOWN, type="invalid_request_error", code=code, message=message)

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error object, always with all four members."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.http == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.retry_helps is not None:
            headers["x-should-retry"] = "true" if self.retry_helps else "false"
        return headers

    def trailing_metadata(self) -> list[tuple[str, str]]:
        return [] if self.retry_after_s is None else [grpc_retry_metadata(self.retry_after_s)]


# First match wins, so subclasses come before their parents.
_TABLE: tuple[tuple[type[PacelineError], int, grpc.StatusCode, str, str, bool | None], ...] = (
    (ModelNotFound, 404, grpc.StatusCode.NOT_FOUND, "invalid_request_error", "model_not_found", None),
    (BodyTooLarge, 413, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", "body_too_large", None),
    (UnknownEncoding, 415, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", "unsupported_encoding", False),
    (HostNotAllowed, 403, grpc.StatusCode.PERMISSION_DENIED, "permission_error", "host_not_allowed", False),
    (OriginNotAllowed, 403, grpc.StatusCode.PERMISSION_DENIED, "permission_error", "origin_not_allowed", False),
    (NoClientCertificate, 403, grpc.StatusCode.UNAUTHENTICATED, "permission_error", "no_client_certificate", False),
    (MetricsElsewhere, 404, grpc.StatusCode.NOT_FOUND, "invalid_request_error", "not_found", None),
    (NotJson, 415, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", "unsupported_media_type", False),
    (InvalidRequest, 400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", "invalid_value", None),
    (Unauthenticated, 401, grpc.StatusCode.UNAUTHENTICATED, "authentication_error", "invalid_api_key", False),
    (TenantDisabled, 403, grpc.StatusCode.PERMISSION_DENIED, "permission_error", "tenant_disabled", False),
    (OverLimit, 429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", "rate_limit_exceeded", None),
    (ObjectiveUnreachable, 429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", "objective_unreachable", None),
    (Overloaded, 429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", "overloaded", None),
    (DeadlineExceeded, 504, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_error", "deadline_exceeded", False),
    (Unavailable, 503, grpc.StatusCode.UNAVAILABLE, "service_unavailable_error", "unavailable", None),
    (LinkError, 503, grpc.StatusCode.UNAVAILABLE, "service_unavailable_error", "unavailable", None),
)
UNAVAILABLE_RETRY_AFTER_S = 1.0


def internal_error(status: int = 500) -> ErrorStatus:
    """Without details, since an unknown error's text may hold anything."""
    return ErrorStatus(
        http=status,
        grpc=grpc.StatusCode.INTERNAL,
        type="server_error",
        code="internal_error",
        message="internal error",
    )


def unwrap(error: BaseException) -> BaseException:
    """The original error: Ray wraps errors of other processes, perhaps repeatedly."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) and error.cause is not error:
        error = error.cause
    return error


def status_of(error: BaseException) -> ErrorStatus:
    """Status for any error; one that is not a `PacelineError` becomes "internal error"."""
    error = unwrap(error)
    for kind, http, grpc_code, openai_type, code, retry_helps in _TABLE:
        if not isinstance(error, kind):
            continue
        retry_after_s = None
        if isinstance(error, Overloaded):
            retry_after_s = error.retry_after_s
        elif http == 503:
            retry_after_s = UNAVAILABLE_RETRY_AFTER_S
        param = None
        if isinstance(error, OverLimit):
            param = error.limit_name
        if isinstance(error, InvalidRequest):
            param = error.field
            code = error.code if kind is InvalidRequest else code
        return ErrorStatus(
            http=http,
            grpc=grpc_code,
            type=openai_type,
            code=code,
            message=str(error),
            param=param,
            retry_after_s=retry_after_s,
            retry_helps=retry_helps,
        )
    return internal_error()
