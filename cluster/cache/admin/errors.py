"""How errors of the cache's administration are told: the one table for HTTP and gRPC."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from actors.errors import InvalidRequest, ModelError, Overloaded
from cache_service.errors import (
    AuditError,
    FormatError,
    NamespaceBusy,
    NamespaceUnknown,
    NamespaceUnread,
    SettingError,
    StoreError,
)
from cluster.errors import ConfigError
from cluster.tenants.errors import RegistryUnusable

RETRY_AFTER_S = 1
UNREAD = "x-paceline-unread"  # beside an export: objects that were left out, since they could not be read
_MAX_MESSAGE_CHARS = 1024  # gRPC clients refuse errors of more than a few kilobytes


@dataclass(frozen=True, slots=True)
class AdminStatus:
    """code: for programs; message: one line."""

    http: int
    grpc: grpc.StatusCode
    code: str
    message: str

    @property
    def is_worth_another_try(self) -> bool:
        return self.http in (409, 429, 503)


# First match wins, so subclasses come before their parents.
_TABLE: tuple[tuple[type[Exception], int, grpc.StatusCode, str], ...] = (
    (InvalidRequest, 400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_value"),
    (RegistryUnusable, 503, grpc.StatusCode.UNAVAILABLE, "registry_unusable"),
    (ConfigError, 400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_document"),
    (ModelError, 400, grpc.StatusCode.FAILED_PRECONDITION, "no_model"),
    (SettingError, 400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_value"),
    (FormatError, 400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_document"),
    (Overloaded, 429, grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded"),
    (NamespaceUnknown, 404, grpc.StatusCode.NOT_FOUND, "namespace_not_found"),
    (NamespaceBusy, 409, grpc.StatusCode.ABORTED, "namespace_busy"),
    (NamespaceUnread, 422, grpc.StatusCode.FAILED_PRECONDITION, "namespace_unread"),
    (StoreError, 503, grpc.StatusCode.UNAVAILABLE, "store_unavailable"),
    (AuditError, 503, grpc.StatusCode.UNAVAILABLE, "audit_unavailable"),
)


def status_of(error: BaseException) -> AdminStatus:
    """What is not one of ours is told as "internal error": its text may hold anything."""
    for kind, http, grpc_code, code in _TABLE:
        if isinstance(error, kind):
            return AdminStatus(http, grpc_code, code, " ".join(str(error).split())[:_MAX_MESSAGE_CHARS])
    return AdminStatus(500, grpc.StatusCode.INTERNAL, "internal_error", "internal error")
