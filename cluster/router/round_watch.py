"""Whether rounds go on while there is work, seen from a thread beside the loop that runs them."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from actors.links.heartbeat import Heartbeat

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0
_GRACE_S = 10.0  # beyond what the present step may take


class Rounds(Protocol):
    """What is watched. All of it may be read from any thread."""

    @property
    def num_steps(self) -> int:
        """Rises whenever the rounds go on."""
        ...

    @property
    def step_limit_s(self) -> float:
        """How long the present step may take: what it waits for has a limit of its own."""
        ...

    @property
    def has_work(self) -> bool: ...


class RoundWatch:
    """Looks every second. A loop that is blocked cannot keep it from seeing that; time in which this process did not
    run at all counts for one look."""

    def __init__(
        self,
        rounds: Rounds,
        grace_s: float = _GRACE_S,
        period_s: float = _PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Made in the thread that runs the rounds."""
        self._rounds = rounds
        self._grace_s = grace_s
        self._period_s = period_s
        self._clock = clock
        self._thread_id = threading.get_ident()
        self._num_steps = -1
        self._looked_at = clock()
        self._still_s = 0.0
        self._is_stalled = False
        self._heartbeat = Heartbeat(self.look, period_s, "watch of the rounds")

    @property
    def stalled_s(self) -> float:
        """For how long rounds have stood still, once that is longer than they may; else 0. For any thread."""
        return self._still_s if self._is_stalled else 0.0

    def look(self) -> None:
        now = self._clock()
        since_s, self._looked_at = now - self._looked_at, now
        num_steps = self._rounds.num_steps
        if num_steps != self._num_steps or not self._rounds.has_work:
            self._num_steps, self._still_s, self._is_stalled = num_steps, 0.0, False
            return
        self._still_s += min(since_s, 2 * self._period_s)
        if not self._is_stalled and self._still_s > self._rounds.step_limit_s + self._grace_s:
            self._is_stalled = True
            frame = sys._current_frames().get(self._thread_id)
            where = "".join(traceback.format_stack(frame)) if frame is not None else ""
            logger.error("rounds have stood still for %.1f s; their thread is at\n%s", self._still_s, where)

    def close(self) -> None:
        self._heartbeat.stop()
