"""Errors of the cache service.

The background threads of the shared cache count them and do not let them out: they only cost speed.
"""

from __future__ import annotations

from typing import Literal


class CorpusError(Exception):
    """A corpus index cannot be built, written or read; the message is one line that names the path and the reason."""


class CacheError(Exception):
    """Base class of the shared cache's errors."""


class SettingError(CacheError):
    """A setting is invalid. The message names field, value and limit, and never holds a password."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(field, value, limit)
        self.field = field
        self.value = value
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.field} is {self.value!r}; {self.limit}"


FormatFault = Literal["garbage", "newer", "oversize", "key"]


class FormatError(CacheError):
    """Bytes from the store are no valid entry, segment or manifest.

    reason: "newer": a later format or key than this process knows, so other processes may be able to read them; "key":
    encrypted with an erased or foreign key, or not encrypted though this process has keys.
    """

    def __init__(self, reason: FormatFault, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason: FormatFault = reason
        self.detail = detail

    def __str__(self) -> str:
        return self.detail


class ServerError(CacheError):
    """The embedded server cannot be found, started or stopped."""


class StoreError(CacheError):
    """Redis did not do what was asked."""


class StoreUnavailable(StoreError):
    """Redis is absent, slow, restarting or gives malformed answers; worth another try."""


class StoreRefused(StoreError):
    """Redis answers with an error: out of memory, read-only, not permitted, or a key holds another type of value."""


class NamespacePurged(StoreRefused):
    """The namespace was purged since the writer last looked; nothing was written.

    purges: the purges noted now, encoded by `purged_times.PurgedTimes`; epoch: the current one, None if there is none.
    """

    def __init__(self, purges: bytes, epoch: str | None = None) -> None:
        super().__init__(purges, epoch)
        self.purges = purges
        self.epoch = epoch

    def __str__(self) -> str:
        return "the namespace has been purged meanwhile"


class ObjectStoreError(CacheError):
    """The object store between clusters did not do what was asked."""


class AuditError(CacheError):
    """The audit log cannot be written, so the action is not done; the message names the path and the reason."""


class NamespaceError(CacheError):
    """An administrative action on a namespace is not possible; the message is one line."""


class NamespaceUnknown(NamespaceError):
    """There is no such namespace."""


class NamespaceBusy(NamespaceError):
    """Another process works on the namespace; try again."""


class NamespaceUnread(NamespaceError):
    """The namespace holds data of a later format or key, which the action would have to read."""
