"""Errors of the cache service.

    CorpusError               a corpus index cannot be built, written or read
    CacheError
    ├── SettingError          a setting is wrong: names field, value and limit
    ├── FormatError           bytes that are no entry, segment or manifest of ours
    ├── ServerError           the embedded server cannot be found, started or stopped
    ├── AuditError            the audit log cannot be written, so nothing is done that it would have to tell
    ├── NamespaceError        an administrator's action on a namespace is not possible
    │   ├── NamespaceUnknown  there is no such namespace
    │   ├── NamespaceBusy     somebody else works on it; worth another try
    │   └── NamespaceUnread   it holds data of a later format or key, which the action would have to read
    └── StoreError            Redis did not do what was asked
        ├── StoreUnavailable  it is absent, slow, restarting, or answers what it cannot mean; worth another try
        └── StoreRefused      it answered no: out of memory, read-only, not permitted, another type of value
            └── NamespacePurged  what was to be written may have been purged meanwhile

None of them leaves the background threads of the shared cache: there they are counted, and cost speed.
"""

from __future__ import annotations

from typing import Literal


class CorpusError(Exception):
    """A corpus index cannot be used; the message is one line that names the path and the reason."""


class CacheError(Exception):
    """Root of what the shared cache raises on purpose."""


class SettingError(CacheError):
    """A setting cannot be used. The message never holds a password."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(field, value, limit)
        self.field = field
        self.value = value
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.field} is {self.value!r}; {self.limit}"


FormatFault = Literal["garbage", "newer", "oversize", "key"]


class FormatError(CacheError):
    """Bytes from the store are not what they should be.

    reason: "newer": they are whole, but of a later format or key than this side knows, so others may be able to read
    them; "key": they are encrypted otherwise than this side can open, and nobody should.
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
    """Redis is absent, slow, restarting or answers nonsense."""


class StoreRefused(StoreError):
    """Redis is there and refuses: out of memory, read-only, not permitted, or a key holds another type of value."""


class NamespacePurged(StoreRefused):
    """Nothing has been written: since the writer looked, the namespace has been purged.

    purges: what is known of purges now, as `purged_times.PurgedTimes` encodes it; epoch: of the data set, None: there
    is none.
    """

    def __init__(self, purges: bytes, epoch: str | None = None) -> None:
        super().__init__(purges, epoch)
        self.purges = purges
        self.epoch = epoch

    def __str__(self) -> str:
        return "the namespace has been purged meanwhile"


class AuditError(CacheError):
    """The audit log cannot be written; the message is one line that names the path and the reason."""


class NamespaceError(CacheError):
    """An administrator's action on a namespace is not possible; the message is one line."""


class NamespaceUnknown(NamespaceError):
    """There is no such namespace."""


class NamespaceBusy(NamespaceError):
    """Somebody else works on the namespace; try again."""


class NamespaceUnread(NamespaceError):
    """The namespace holds data that this side cannot read, and the action would have to."""
