"""Time ranges that were purged from a namespace, so that tokens still queued somewhere are not written afterwards.

A purge leaves these ranges in Redis for KEEP_S. Writers check them with every write and drop tokens inside them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cache_service.errors import SettingError

FIRST_S, LAST_S = 0, 2**32 - 1
KEEP_S = 3600
"""Longer than tokens stay in a publisher's queue: after an hour of outage newer tokens have displaced most of them."""

_MAX_RANGES = 32
_RANGE = re.compile(r"([0-9]{1,10})-([0-9]{1,10})")


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Unix times in seconds, both inclusive. Raises SettingError."""

    since_s: int = FIRST_S
    until_s: int = LAST_S

    def __post_init__(self) -> None:
        for name in ("since_s", "until_s"):
            if not FIRST_S <= getattr(self, name) <= LAST_S:
                raise SettingError(name, getattr(self, name), f"it must be a Unix time of {FIRST_S} to {LAST_S}")
        if self.since_s > self.until_s:
            raise SettingError("since_s", self.since_s, f"it must not be later than until_s, {self.until_s}")

    @property
    def is_all(self) -> bool:
        return self == TimeRange()

    def covers(self, time_s: int) -> bool:
        return self.since_s <= time_s <= self.until_s

    def holds(self, first_s: int, last_s: int) -> bool:
        """Whether all times from first to last are in the range."""
        return self.since_s <= first_s and last_s <= self.until_s

    def meets(self, first_s: int, last_s: int) -> bool:
        """Whether any time from first to last is in the range."""
        return first_s <= self.until_s and self.since_s <= last_s


@dataclass(frozen=True, slots=True)
class PurgedTimes:
    """Ranges purged in the last hour."""

    ranges: tuple[TimeRange, ...] = ()

    def covers(self, time_s: int) -> bool:
        return any(purged.covers(time_s) for purged in self.ranges)

    def and_also(self, purged: TimeRange) -> PurgedTimes:
        """With one more range; beyond _MAX_RANGES the oldest are dropped."""
        others = [known for known in self.ranges if not purged.holds(known.since_s, known.until_s)]
        return PurgedTimes((*others, purged)[-_MAX_RANGES:])

    def encode(self) -> bytes:
        return " ".join(f"{purged.since_s}-{purged.until_s}" for purged in self.ranges).encode()

    @classmethod
    def decode(cls, text: bytes) -> PurgedTimes:
        """Raises ValueError for text that `encode` did not make."""
        matches = [_RANGE.fullmatch(part) for part in text.decode("ascii").split()]
        if len(matches) > _MAX_RANGES:
            raise ValueError
        ranges = []
        for match in matches:
            if match is None or int(match[1]) > int(match[2]) or int(match[2]) > LAST_S:
                raise ValueError
            ranges.append(TimeRange(int(match[1]), int(match[2])))
        return cls(tuple(ranges))
