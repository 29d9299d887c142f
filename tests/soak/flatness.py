"""Whether something that is sampled for long has stopped to grow: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a series may grow in the half that is judged: a share of its median, and this much in any case."""

    share: float
    least: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """The second half of a series."""

    name: str
    median: float
    most: float  # of the whole series
    growth: float  # from the beginning of the half to its end, by its slope
    allowed: float

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.allowed


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The median slope of all pairs of samples (Theil 1950, Sen 1968): a few outliers do not turn it."""
    x, y = np.asarray(times, np.float64), np.asarray(values, np.float64)
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] > x[first]
    if not apart.any():
        return 0.0
    first, second = first[apart], second[apart]
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def judge(name: str, times: Sequence[float], values: Sequence[float], bound: Bound) -> Judgement:
    """times: seconds, shape [n >= 1], rising; values: shape [n]."""
    half = times[0] + (times[-1] - times[0]) / 2
    late = [row for row, time in enumerate(times) if time >= half]
    late_times, late_values = [times[row] for row in late], [values[row] for row in late]
    median = float(np.median(late_values))
    growth = slope(late_times, late_values) * (late_times[-1] - late_times[0])
    return Judgement(name, median, max(values), growth, max(bound.least, bound.share * abs(median)))
