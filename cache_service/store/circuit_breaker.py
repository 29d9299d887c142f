"""When to retry a failing service: pure bookkeeping, the caller brings the clock."""

from __future__ import annotations

MAX_FAILURES = 3
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0


class CircuitBreaker:
    """Closed: every try is allowed. It opens after `max_failures` in a row and allows one try after each pause.

    The pauses double from `first_pause_s` to `max_pause_s` until a try succeeds. Not thread-safe.
    """

    __slots__ = ("_failures", "_first_pause_s", "_max_failures", "_max_pause_s", "_next_try", "num_opened")

    def __init__(
        self,
        max_failures: int = MAX_FAILURES,
        first_pause_s: float = FIRST_PAUSE_S,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        self._max_failures = max_failures
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._failures = 0
        self._next_try = 0.0
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        return self._failures >= self._max_failures

    def wait_s(self, now: float) -> float:
        """Seconds until the next try is allowed; 0: now."""
        return max(0.0, self._next_try - now) if self.is_open else 0.0

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, now: float) -> None:
        self._failures += 1
        beyond = self._failures - self._max_failures
        if beyond == 0:
            self.num_opened += 1
        if beyond >= 0:
            pause = self._first_pause_s * 2.0 ** min(beyond, 30)
            self._next_try = now + min(self._max_pause_s, pause)
