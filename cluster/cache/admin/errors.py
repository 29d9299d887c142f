"""HTTP status and code of each error of the cache administration."""

from __future__ import annotations

from dataclasses import dataclass

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
_MAX_MESSAGE_CHARS = 1024  # a message may quote a value of any length


@dataclass(frozen=True, slots=True)
class AdminStatus:
    """code: for programs; message: one line."""

    http: int
    code: str
    message: str

    @property
    def is_worth_another_try(self) -> bool:
        return self.http in (409, 429, 503)


# First match wins, so subclasses come before their parents.
_TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (InvalidRequest, 400, "invalid_value"),
    (RegistryUnusable, 503, "registry_unusable"),
    (ConfigError, 400, "invalid_document"),
    (ModelError, 400, "no_model"),
    (SettingError, 400, "invalid_value"),
    (FormatError, 400, "invalid_document"),
    (Overloaded, 429, "overloaded"),
    (NamespaceUnknown, 404, "namespace_not_found"),
    (NamespaceBusy, 409, "namespace_busy"),
    (NamespaceUnread, 422, "namespace_unread"),
    (StoreError, 503, "store_unavailable"),
    (AuditError, 503, "audit_unavailable"),
)


def status_of(error: BaseException) -> AdminStatus:
    """An unknown error becomes "internal error", since its text may hold anything."""
    for kind, http, code in _TABLE:
        if isinstance(error, kind):
            return AdminStatus(http, code, " ".join(str(error).split())[:_MAX_MESSAGE_CHARS])
    return AdminStatus(500, "internal_error", "internal error")
