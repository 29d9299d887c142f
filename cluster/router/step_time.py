"""The time of a target forward by its number of rows, measured while serving."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from cluster.router.calibration import isotonic

_SAMPLES_PER_TIER = 15
_SAMPLES_OF_PACE = 5
_MOST_PACE = 2.0  # and its inverse; beyond, measurements take it over
_MOST_RATIO = 1e3  # and its inverse, of one forward's time to the tier's
_TABLE_ROWS = 512  # row counts whose times are kept; more are interpolated when asked for
_PROFILE_WEIGHT = 2  # measurements that the profile counts as
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

    __slots__ = ("point", "rows", "seconds")

    def __init__(self) -> None:
        self.point = (0.0, 0.0)  # (mean rows, typical seconds) as the curve has it
        self.rows: deque[int] = deque(maxlen=_SAMPLES_PER_TIER)
        self.seconds: deque[float] = deque(maxlen=_SAMPLES_PER_TIER)

    def add(self, rows: int, seconds: float) -> bool:
        """Add a measurement. True if the tier's point has moved enough to rebuild the curve."""
        self.rows.append(rows)
        self.seconds.append(seconds)
        # The median; of one or two samples the smaller, because a first forward of a shape may have compiled or
        # allocated something.
        count = len(self.seconds)
        ordered = sorted(self.seconds)
        typical = ordered[0] if count < 3 else ordered[count // 2]
        mean_rows = self.rows[self.seconds.index(typical)] if count < 3 else sum(self.rows) / count
        is_settled = count == _SAMPLES_PER_TIER  # before that, each measurement takes weight from the profile
        if (
            is_settled
            and abs(typical - self.point[1]) <= 0.01 * typical
            and abs(mean_rows - self.point[0]) <= 0.02 * mean_rows
        ):
            return False
        self.point = (mean_rows, typical)
        return True

    def scale(self, factor: float) -> None:
        self.seconds = deque((factor * seconds for seconds in self.seconds), maxlen=_SAMPLES_PER_TIER)
        self.point = (self.point[0], factor * self.point[1])

    def typical_with(self, expected: float) -> float:
        """The median if there were a few more measurements, as expected; of an even number the lower one."""
        ordered = sorted([*self.seconds, *[expected] * _PROFILE_WEIGHT])
        return ordered[(len(ordered) - 1) // 2]


class StepTimeCurve:
    """t_verify(rows): a rising, piecewise linear curve through the medians of row tiers.

    Each tier keeps its last 15 measurements; their median ignores a single slow forward. A shared machine and growing
    contexts slow down all forwards at once, also those of rarely measured tiers. So measurements are divided by a pace:
    the median ratio of the last few forwards in well-known tiers to the medians there. The medians are made
    non-decreasing by isotonic regression. Outside the measured range the curve continues with its last slope, at least
    a small prior slope: an optimistic estimate, so that the planner tries unknown row counts. Profile points `(rows,
    seconds)` stand for tiers without measurements, and count as two in the others up to the profile's largest: a slow
    forward or two in a tier that few rounds come to must not keep the planner away from it for good. They are scaled by
    the ratio of measurement to profile in the nearest tier that has several measurements, because rounds are slower
    than the profile's short contexts.

    A target may pad a forward to one of a few row counts, ascending in `row_steps`: then time rises in steps, and a row
    within a step is free. Beyond the last step, or without steps, every row costs time.
    """

    def __init__(self, profile: Iterable[tuple[int, float]] = (), row_steps: Iterable[int] = ()) -> None:
        self._steps = np.array(list(row_steps), np.int64)
        if len(self._steps) and (self._steps[0] < 1 or (np.diff(self._steps) <= 0).any()):
            raise ValueError(f"row_steps {self._steps.tolist()}: they must be >= 1 and ascend")
        self._tiers: dict[int, _Tier] = {}
        self._profile: dict[int, tuple[float, float]] = {}  # (rows, seconds) by tier
        for rows, seconds in profile:
            if rows < 1 or not (math.isfinite(seconds) and seconds > 0.0):
                raise ValueError(f"profile point ({rows}, {seconds}): rows must be >= 1 and seconds finite and > 0")
            filled = self._filled(rows)
            self._profile[bisect_left(_TIERS, filled)] = (float(filled), seconds)
        self._profile_curve = _curve_through(self._profile, dict.fromkeys(self._profile, 1.0))
        self._use(self._profile_curve)
        self._pace = 1.0
        self._paces: deque[float] = deque(maxlen=_SAMPLES_OF_PACE)

    def observe(self, rows: int, seconds: float) -> None:
        """Add the time of one forward. Impossible values (no rows, no time, not finite) are ignored."""
        if rows < 1 or rows > _TIERS[-1] or not (math.isfinite(seconds) and seconds > 0.0):
            return
        rows = self._filled(rows)
        index = bisect_left(_TIERS, rows)
        tier = self._tiers.get(index)
        if tier is None:
            tier = self._tiers[index] = _Tier()
        if len(tier.seconds) >= _SAMPLES_OF_PACE:
            # To the tier's own median, with the curve's slope: the curve may lie beside it for good, and the pace would
            # go ever further away.
            usual, here = self.times(round(tier.point[0]), 1)[0], self.times(rows, 1)[0]
            ratio = seconds / tier.point[1] * float(usual / here)
            self._paces.append(min(max(ratio, 1.0 / _MOST_RATIO), _MOST_RATIO))
            self._pace = sorted(self._paces)[len(self._paces) // 2]
            if not 1.0 / _MOST_PACE <= self._pace <= _MOST_PACE:
                self._take_over_pace()
        self._changed |= tier.add(rows, seconds / self._pace)

    def _take_over_pace(self) -> None:
        """Scale all measurements by the pace, which becomes 1: times stay the same."""
        for tier in self._tiers.values():
            tier.scale(self._pace)
        self._paces = deque((pace / self._pace for pace in self._paces), maxlen=_SAMPLES_OF_PACE)
        self._pace, self._changed = 1.0, True

    def times(self, first: int, count: int) -> np.ndarray:
        """Seconds for first, first + 1, ..., first + count - 1 rows: float64 [count], non-decreasing, > 0."""
        if self._changed:
            self._rebuild()
        last = first + count - 1
        is_in_table = first >= 1 and last <= _TABLE_ROWS
        return self._pace * (self._table[first - 1 : last] if is_in_table else self._interpolated(first, last))

    def _interpolated(self, first: int, last: int) -> np.ndarray:
        """Seconds for first, ..., last rows without the pace: float64."""
        rows = np.arange(first, last + 1)
        if len(self._steps):
            step = np.searchsorted(self._steps, rows)
            rows = np.where(rows <= self._steps[-1], self._steps[np.minimum(step, len(self._steps) - 1)], rows)
        return np.interp(rows, *self._curve)

    def _use(self, curve: tuple[np.ndarray, np.ndarray]) -> None:
        self._curve = curve
        self._table = self._interpolated(1, _TABLE_ROWS)
        self._changed = False

    def times_of_drafts(self, rows: int, decoding_rows: int, count: int) -> np.ndarray:
        """Seconds of a round of `decoding_rows` rows with 0, 1, ..., count - 1 draft rows more: float64 [count],
        non-decreasing, > 0. The round holds `rows` rows without drafts.

        The other rows belong to prompts. They must be computed in some round, so their time is left out: compared with
        it, any draft would seem cheap. A draft row costs what a row costs in a round of this size, and at least the
        mean cost of a prompt row, because the curve's slope between two neighbouring measurements is rough.
        """
        if rows <= decoding_rows:
            return self.times(rows, count)
        with_drafts = self.times(rows, count)
        decoding_s = self.seconds(decoding_rows)
        prompt_row_s = (with_drafts[0] - decoding_s) / (rows - decoding_rows)
        extra_s: np.ndarray = np.maximum(with_drafts - with_drafts[0], prompt_row_s * np.arange(count))
        return decoding_s + extra_s

    def seconds(self, rows: int) -> float:
        return float(self.times(rows, 1)[0])

    def next_unsure_rows(self, rows: int) -> int:
        """The end of the next tier above `rows`, a row count worth measuring; `rows` if there is none."""
        index = bisect_right(_TIERS, self._filled(rows))
        return self._filled(_TIERS[index]) if index < len(_TIERS) else rows

    def _filled(self, rows: int) -> int:
        """Rows that the target computes for `rows`."""
        step = int(np.searchsorted(self._steps, rows))
        return int(self._steps[step]) if step < len(self._steps) else rows

    def _rebuild(self) -> None:
        points = {index: tier.point for index, tier in self._tiers.items()}
        weights = {index: float(len(tier.seconds)) for index, tier in self._tiers.items()}
        if self._profile:
            self._reconcile_with_profile(points, weights)
        self._use(_curve_through(points, weights))

    def _reconcile_with_profile(self, points: dict[int, tuple[float, float]], weights: dict[int, float]) -> None:
        """Draw the points of measured tiers to the profile, and add its own for the others."""
        profiled = [rows for rows, _ in self._profile.values()]
        slower = {
            index: seconds / self._profiled(rows)
            for index, (rows, seconds) in points.items()
            if min(profiled) <= rows <= max(profiled)  # a ratio to an extrapolation tells nothing of the profile
        }
        well_known = {
            index: ratio for index, ratio in slower.items() if len(self._tiers[index].seconds) >= _SAMPLES_OF_PACE
        }

        def expected(index: int, rows: float, ratios: Mapping[int, float]) -> float:
            nearest = min(ratios, key=lambda tier: abs(tier - index), default=None)
            return self._profiled(rows) * (1.0 if nearest is None else ratios[nearest])

        for index, tier in self._tiers.items():
            rows, _ = points[index]
            if well_known and rows <= max(profiled):
                points[index] = rows, tier.typical_with(expected(index, rows, well_known))
        for index, (rows, _) in self._profile.items():
            if index not in self._tiers:
                points[index] = rows, expected(index, rows, well_known or slower)
                weights[index] = 1.0

    def _profiled(self, rows: float) -> float:
        return float(np.interp(rows, *self._profile_curve))


def _curve_through(
    points: Mapping[int, tuple[float, float]], weights: Mapping[int, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and seconds of the knots, float64 [n], n >= 2; the points are (rows, seconds) by tier."""
    order = sorted(points)
    rows = [points[index][0] for index in order] or [1.0]
    measured = np.array([points[index][1] for index in order], np.float64)
    seconds = isotonic(measured, np.array([weights[index] for index in order], np.float64)).tolist() or [_PRIOR_SECONDS]
    if rows[0] > 1.0:
        seconds.insert(0, seconds[0] / (1.0 + _PRIOR_SLOPE * (rows[0] - 1.0)))
        rows.insert(0, 1.0)
    slope = _PRIOR_SLOPE * seconds[0]
    if len(rows) > 1:
        slope = max(slope, (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2]))
    beyond = float(_TIERS[-1] * 2)
    return np.array([*rows, beyond]), np.array([*seconds, seconds[-1] + slope * (beyond - rows[-1])])
