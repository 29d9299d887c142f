"""Which draft model the workers of a pool are to run, as set by hand, and whose turn it is to load it.

One worker of a pool at a time changes its model: the others draft meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

_MOST_REFUSALS = 64  # per pool; a restarted worker counts as a new one
_MOST_CHARACTERS = 2000  # of a reason


class WantedModel(msgspec.Struct, frozen=True):
    """What a pool's workers are to run."""

    spec: str = ""  # as `resolve_model` reads it; "": the model of the configuration
    number: int = 0  # rises with each word from the operator, whichever directory heard it; 0: there was none


@dataclass(slots=True)
class _Turn:
    worker: str
    renewed_at: float


class ModelTurns:
    """Gives turns, which expire if they are not renewed within `ttl_s` seconds. Workers have separate names here, which
    a change of the model does not affect."""

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._turns: dict[str, _Turn] = {}  # by pool

    def take(self, pool: str, worker: str) -> bool:
        """Whether it is this worker's turn from now on. Renews a turn that it has."""
        now, turn = self._clock(), self._turns.get(pool)
        if turn is not None and turn.worker != worker and now - turn.renewed_at <= self._ttl_s:
            return False
        self._turns[pool] = _Turn(worker, now)
        return True

    def end(self, pool: str, worker: str) -> None:
        """The worker has changed its model, or cannot."""
        turn = self._turns.get(pool)
        if turn is not None and turn.worker == worker:
            del self._turns[pool]


def add_refusal(reasons: dict[str, str], worker: str, reason: str) -> None:
    """Add why a worker keeps the model that it has. reasons: by worker, those of a pool; the latest 64 are kept."""
    reasons.pop(worker, None)
    reasons[worker] = reason[:_MOST_CHARACTERS]
    if len(reasons) > _MOST_REFUSALS:
        del reasons[next(iter(reasons))]
