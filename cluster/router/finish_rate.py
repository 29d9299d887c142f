"""Requests that end per second while all places are taken, which determines waiting times."""

from __future__ import annotations

from collections import deque

_RECENT = 64  # requests that count
_ENOUGH = 4  # ends that make a rate


class FinishRate:
    """Time without a queue does not count: an idle or lightly loaded server is not a slow one."""

    def __init__(self) -> None:
        self._queued_s = 0.0  # a clock that runs only while requests wait
        self._queued_since: float | None = None  # last event with a queue; None: there was none
        self._ends: deque[float] = deque(maxlen=_RECENT)  # by that clock
        self._running_times_s: deque[float] = deque(maxlen=_RECENT)

    def observe(self, has_queue: bool, now: float) -> None:
        """At every arrival and end. has_queue: whether requests wait for a place, before what happens now."""
        if self._queued_since is not None:
            self._queued_s += max(0.0, now - self._queued_since)
        self._queued_since = now if has_queue else None

    def ended(self, running_s: float) -> None:
        """A request left its place, after so many seconds. Call after `observe`."""
        self._running_times_s.append(running_s)
        if self._queued_since is not None:
            self._ends.append(self._queued_s)

    def per_second(self, num_places: int) -> float | None:
        """None: unknown. Without enough ends with a queue, as if all places took as long as the last requests."""
        if len(self._ends) >= _ENOUGH and self._queued_s > self._ends[0]:
            return (len(self._ends) - 1) / (self._queued_s - self._ends[0])
        total_s = sum(self._running_times_s)
        return num_places * len(self._running_times_s) / total_s if total_s > 0 else None
