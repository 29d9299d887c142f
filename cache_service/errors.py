"""Errors of the cache service.

    CorpusError               a corpus index cannot be built, written or read
    CacheError
    ├── SettingError          a setting is wrong: names field, value and limit
    ├── FormatError           bytes that are no entry, segment or manifest of ours
    ├── ServerError           the embedded server cannot be found, started or stopped
    └── StoreError            Redis did not do what was asked
        ├── StoreUnavailable  it is absent, slow, restarting, or answers what it cannot mean; worth another try
        └── StoreRefused      it answered no: out of memory, read-only, not permitted, another type of value

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
