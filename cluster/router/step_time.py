"""How long a target forward takes by its number of rows, measured while serving."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np

from cluster.router.isotonic import isotonic

_SAMPLES_PER_TIER = 15
_PRIOR_SECONDS = 0.03  # a forward of one row, before anything is known
_PRIOR_SLOPE = 0.01  # a row more costs this share of the first one, where nothing was measured


def _tiers() -> list[int]:
    """Upper bounds of the row tiers: 1, 2, 3, 4, 6, 8, 12, 16, ... each half a doubling."""
    bounds = [1, 2, 3]
    while bounds[-1] < 1 << 17:
        bounds.append(bounds[-2] * 2)
    return bounds


_TIERS = _tiers()


class _Tier:
    """The last few measurements between two row counts."""

    __slots__ = ("point", "rows", "seconds", "write")

    def __init__(self) -> None:
        self.point = (0.0, 0.0)  # (mean rows, typical seconds) as the curve has it
        self.rows: list[int] = []
        self.seconds: list[float] = []
        self.write = 0

    def add(self, rows: int, seconds: float) -> bool:
        """Take in a measurement; True if the tier's point has moved enough for the curve to follow."""
        if len(self.seconds) < _SAMPLES_PER_TIER:
            self.rows.append(rows)
            self.seconds.append(seconds)
        else:
            self.rows[self.write] = rows
            self.seconds[self.write] = seconds
            self.write = (self.write + 1) % _SAMPLES_PER_TIER
        # The median; of one or two samples the smaller, because a first forward of a shape may have compiled or
        # allocated something.
        count = len(self.seconds)
        ordered = sorted(self.seconds)
        typical = ordered[0] if count < 3 else ordered[count // 2]
        mean_rows = sum(self.rows) / count
        if abs(typical - self.point[1]) <= 0.01 * typical and abs(mean_rows - self.point[0]) <= 0.02 * mean_rows:
            return False
        self.point = (mean_rows, typical)
        return True


class StepTimeCurve:
    """t_verify(rows): a rising, piecewise linear curve through the medians of row tiers.

    Each tier keeps its last 15 measurements, so that a changed machine is noticed and one slow forward is not. The
    medians are made non-decreasing by isotonic regression. Outside the measured range the curve goes on with its
    last slope, and at least with a small prior slope: optimistic, so that the planner tries what it does not know.
    Profile points `(rows, seconds)` stand in for tiers that have no measurement of their own yet.
    """

    def __init__(self, profile: Iterable[tuple[int, float]] = ()) -> None:
        self._tiers: dict[int, _Tier] = {}
        self._profile: dict[int, tuple[float, float]] = {}
        for rows, seconds in profile:
            if rows < 1 or not (math.isfinite(seconds) and seconds > 0.0):
                raise ValueError(f"profile point ({rows}, {seconds}): rows must be >= 1 and seconds finite and > 0")
            self._profile[bisect_left(_TIERS, rows)] = (float(rows), seconds)
        self._knot_rows = np.empty(0)
        self._knot_seconds = np.empty(0)
        self._changed = True

    def observe(self, rows: int, seconds: float) -> None:
        """Take in one forward. Values that cannot be a measurement (no rows, no time, not finite) are ignored."""
        if rows < 1 or rows > _TIERS[-1] or not (math.isfinite(seconds) and seconds > 0.0):
            return
        index = bisect_left(_TIERS, rows)
        tier = self._tiers.get(index)
        if tier is None:
            tier = self._tiers[index] = _Tier()
        self._changed |= tier.add(rows, seconds)

    def times(self, first: int, count: int) -> np.ndarray:
        """Seconds for first, first + 1, ..., first + count - 1 rows: float64 [count], non-decreasing, > 0."""
        if self._changed:
            self._rebuild()
        return np.interp(np.arange(first, first + count, dtype=np.float64), self._knot_rows, self._knot_seconds)

    def seconds(self, rows: int) -> float:
        return float(self.times(rows, 1)[0])

    def next_unsure_rows(self, rows: int) -> int:
        """The row count above `rows` that is worth trying: the end of the next tier."""
        index = bisect_left(_TIERS, rows)
        if _TIERS[index] > rows:
            return _TIERS[index]
        return _TIERS[min(index + 1, len(_TIERS) - 1)]

    def _rebuild(self) -> None:
        points = dict(self._profile)
        weights = dict.fromkeys(points, 1.0)
        for index, tier in self._tiers.items():
            points[index] = tier.point
            weights[index] = float(len(tier.seconds))
        self._changed = False
        if not points:
            points[0], weights[0] = (1.0, _PRIOR_SECONDS), 1.0
        order = sorted(points)
        rows = [points[index][0] for index in order]
        seconds = isotonic([points[index][1] for index in order], [weights[index] for index in order])
        if rows[0] > 1.0:
            seconds.insert(0, seconds[0] / (1.0 + _PRIOR_SLOPE * (rows[0] - 1.0)))
            rows.insert(0, 1.0)
        slope = _PRIOR_SLOPE * seconds[0]
        if len(rows) > 1:
            slope = max(slope, (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]))
        beyond = float(_TIERS[-1] * 2)
        seconds.append(seconds[-1] + slope * (beyond - rows[-1]))
        rows.append(beyond)
        self._knot_rows = np.array(rows)
        self._knot_seconds = np.array(seconds)
