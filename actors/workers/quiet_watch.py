"""Decides when a leaving worker may stop: when all routers have noticed."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_LEAVE_S = 4.0
_QUIET_S = 0.75  # time without a batch


class QuietWatch:
    """Create it when the worker has announced that it leaves."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + LONGEST_LEAVE_S
        self._quiet_since = clock()
        self._num_batches = -1

    def is_over(self, num_batches: int, is_busy: bool) -> bool:
        """Whether no batch has come for a while, or the longest wait is over. num_batches: received so far."""
        now = self._clock()
        if is_busy or num_batches != self._num_batches:
            self._quiet_since, self._num_batches = now, num_batches
        return now >= min(self._ends_at, self._quiet_since + _QUIET_S)
