"""Whether something that is sampled for long has stopped to grow: pure functions."""

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
    growth: float  # over the half, by the medians of its two quarters
    allowed: float

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.allowed


def judge(name: str, times: Sequence[float], values: Sequence[float], bound: Bound) -> Judgement:
    """times: seconds, shape [n >= 1], rising; values: shape [n].

    Medians, since what is watched rises and falls as a saw's teeth do, and samples may be off now and then. Those of
    the quarters lie half as far apart as what grows steadily does in the half.
    """
    x, y = np.asarray(times, np.float64), np.asarray(values, np.float64)
    begin, end = x[0] + (x[-1] - x[0]) / 2, x[-1]
    is_last = x >= (begin + end) / 2
    third, last = y[(x >= begin) & ~is_last], y[is_last]
    growth = 2.0 * float(np.median(last) - np.median(third)) if len(third) else 0.0
    median = float(np.median(y[x >= begin]))
    return Judgement(name, median, float(y.max()), growth, max(bound.least, bound.share * abs(median)))
