"""When a worker that leaves may stop: once all routers have seen that it leaves."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_LEAVE_S = 4.0
_QUIET_S = 0.75  # without a batch


class QuietWatch:
    """Made when the worker has announced that it leaves."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + LONGEST_LEAVE_S
        self._quiet_since = clock()
        self._num_batches = -1

    def is_over(self, num_batches: int, is_busy: bool) -> bool:
        """Whether nothing has come for a while, or the worker has waited long enough. num_batches: received so far."""
        now = self._clock()
        if is_busy or num_batches != self._num_batches:
            self._quiet_since, self._num_batches = now, num_batches
        return now >= min(self._ends_at, self._quiet_since + _QUIET_S)
