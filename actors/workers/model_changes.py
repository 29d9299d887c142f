"""Which draft model the workers of a pool are to run, as set by hand, and whose turn it is to load it.

One worker of a pool at a time changes its model: the others draft meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

_MOST_REFUSALS = 64  # of a pool: every worker that starts anew is another one
_MOST_CHARACTERS = 2000  # of a reason


class WantedModel(msgspec.Struct, frozen=True):
    """What a pool's workers are to run."""

    spec: str = ""  # as `resolve_model` reads it; "": the model of the configuration
    number: int = 0  # rises with each word from the operator; 0: there was none


@dataclass(slots=True)
class _Turn:
    worker: str
    renewed_at: float


class ModelTurns:
    """Gives turns, which expire if they are not renewed within `ttl_s` seconds, and keeps what workers say of models
    that they could not load. Workers have names of their own here, which a change of the model does not change."""

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._turns: dict[str, _Turn] = {}  # by pool
        self._refusals: dict[str, dict[str, str]] = {}  # by pool and worker: why

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

    def refuse(self, pool: str, worker: str, reason: str) -> None:
        """The worker keeps the model that it has, because it cannot load the other one. The latest 64 are kept."""
        reasons = self._refusals.setdefault(pool, {})
        reasons.pop(worker, None)
        reasons[worker] = reason[:_MOST_CHARACTERS]
        if len(reasons) > _MOST_REFUSALS:
            del reasons[next(iter(reasons))]

    def refusals(self, pool: str) -> list[str]:
        """Reasons, one from each worker that has refused what is wanted now."""
        return list(self._refusals.get(pool, {}).values())

    def forget_refusals(self, pool: str) -> None:
        """Another model is wanted."""
        self._refusals.pop(pool, None)
