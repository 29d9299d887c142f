"""A token bucket with a fixed rate and capacity."""

from __future__ import annotations


class TokenBucket:
    """Begins full. The level may go below zero, since a cost may be known only afterwards. Amounts are requests or
    tokens; times are seconds of any monotonic clock."""

    __slots__ = ("_level", "_updated", "capacity", "rate")

    def __init__(self, rate: float, capacity: float, now: float) -> None:
        """rate: amount a second, above 0."""
        self.rate = rate
        self.capacity = capacity
        self._level = capacity
        self._updated = now

    def level(self, now: float) -> float:
        if now > self._updated:
            self._level = min(self.capacity, self._level + (now - self._updated) * self.rate)
            self._updated = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until this amount is available; 0: now. An amount above the capacity waits for a full bucket."""
        return max(0.0, min(amount, self.capacity) - self.level(now)) / self.rate

    def take(self, amount: float, now: float) -> None:
        """Take the amount even if the level is lower."""
        self._level = self.level(now) - amount

    def set_level(self, level: float, then: float) -> None:
        """Set the level as of a time, from which it fills up."""
        self._level = min(level, self.capacity)
        self._updated = then

    def change(self, rate: float, capacity: float, now: float) -> None:
        """Change rate and capacity; the level stays, up to the new capacity."""
        self._level = min(self.level(now), capacity)
        self.rate = rate
        self.capacity = capacity
