"""Forward times of the target by rows and context."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import Protocol

import numpy as np

from cluster.deploy.size.placed_model import PlacedModel
from cluster.simulate.options import ForwardOptions

_PROFILE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class ForwardTimes(Protocol):
    @property
    def row_steps(self) -> tuple[int, ...]:
        """Row counts that forwards are padded to, ascending."""
        ...

    def seconds(self, rows: int, sequences: int, context: int, unscored: int = 0) -> float:
        """A forward of `rows` rows of `sequences` with `context` cached tokens, all together.

        unscored: the rows of prompts that have no logits.
        """
        ...


class MeasuredTimes:
    """A line through measured points; beyond the last one it goes on with its last slope, if it rises."""

    def __init__(self, options: ForwardOptions) -> None:
        self._rows, self._seconds = (np.array(column, np.float64) for column in zip(*options.row_times, strict=True))
        self._options = options
        self.row_steps = options.row_steps
        self._of_rows = lru_cache(4096)(self._interpolated)

    def seconds(self, rows: int, sequences: int, context: int, unscored: int = 0) -> float:
        told = self._options
        extra_s = told.scored_row_s * (rows - unscored) + told.sequence_s * max(0, sequences - 1)
        return self._of_rows(rows) + extra_s + told.context_token_s * context

    def _interpolated(self, rows: int) -> float:
        known, seconds = self._rows, self._seconds
        if (step := bisect_left(self.row_steps, rows)) < len(self.row_steps):
            rows = self.row_steps[step]
        if rows <= known[-1] or len(known) == 1:
            return float(np.interp(rows, known, seconds))
        slope = max(0.0, seconds[-1] - seconds[-2]) / (known[-1] - known[-2])
        return float(seconds[-1] + slope * (rows - known[-1]))


class RooflineTimes:
    """The estimate of `paceline size` for a model on GPUs."""

    row_steps: tuple[int, ...] = ()

    def __init__(self, model: PlacedModel) -> None:
        self._model = model

    def seconds(self, rows: int, sequences: int, context: int, unscored: int = 0) -> float:
        count = max(1, sequences)
        return self._model.forward_time(rows, count, context // count).total_s


def profile_of(times: ForwardTimes) -> list[tuple[int, float]]:
    """What a target tells its router when it starts."""
    return [(rows, times.seconds(rows, 1, 0)) for rows in _PROFILE_ROWS]
