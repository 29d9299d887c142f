"""When what a namespace had learnt was purged, so that what still waits somewhere is not written afterwards.

A purge leaves these times in Redis, nothing else, for as long as tokens may wait in a queue. Writers read them together
with what they write, and drop what they cover.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cache_service.errors import SettingError

FIRST_S, LAST_S = 0, 2**32 - 1
KEEP_S = 3600
"""Longer than a publisher's queue lasts: what it cannot write for an hour it has dropped for newer tokens, or it is
idle and has little."""

_MAX_RANGES = 32
_RANGE = re.compile(r"([0-9]{1,10})-([0-9]{1,10})")


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Unix times in seconds, both included. Raises SettingError."""

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
        """All times from first to last."""
        return self.since_s <= first_s and last_s <= self.until_s

    def meets(self, first_s: int, last_s: int) -> bool:
        """Any time from first to last."""
        return first_s <= self.until_s and self.since_s <= last_s


@dataclass(frozen=True, slots=True)
class PurgedTimes:
    """What purges of the last hour have covered; empty: none."""

    ranges: tuple[TimeRange, ...] = ()

    def covers(self, time_s: int) -> bool:
        return any(purged.covers(time_s) for purged in self.ranges)

    def and_also(self, purged: TimeRange) -> PurgedTimes:
        """With one more; of many, the oldest are given up."""
        others = [known for known in self.ranges if not purged.holds(known.since_s, known.until_s)]
        return PurgedTimes((*others, purged)[-_MAX_RANGES:])

    def encode(self) -> bytes:
        return " ".join(f"{purged.since_s}-{purged.until_s}" for purged in self.ranges).encode()

    @classmethod
    def decode(cls, text: bytes) -> PurgedTimes:
        """Raises ValueError for what `encode` has not made."""
        matches = [_RANGE.fullmatch(part) for part in text.decode("ascii").split()]
        if len(matches) > _MAX_RANGES:
            raise ValueError
        ranges = []
        for match in matches:
            if match is None or int(match[1]) > int(match[2]) or int(match[2]) > LAST_S:
                raise ValueError
            ranges.append(TimeRange(int(match[1]), int(match[2])))
        return cls(tuple(ranges))
