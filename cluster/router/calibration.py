"""What a drafter's confidence is worth: learnt online, one curve per source."""

from __future__ import annotations

import numpy as np

from cluster.router.isotonic import isotonic

# Finer near the ends: a node of 0.02 may still pay on an idle target, and 0.9 differs from 0.97 after ten of them.
KNOTS = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.0])

_PRIOR_STRENGTH = 6.0  # observations a knot's prior is worth
_MAX_WEIGHT = 96.0  # observations a knot remembers
_REFRESH_ROUNDS = 8
_DECAY = 0.98  # of all weights, every refresh: a source that was bad is tried again after some hundred rounds


class Calibration:
    """confidence -> probability that the node is accepted, for each of `num_sources` sources.

    Every verified node is one observation, shared between the two knots around its confidence. A knot's level is
    (hits + prior) / (trials + prior strength), where the prior is the confidence itself times the source's overall
    ratio of accepted to promised nodes, so that few samples move the whole curve and many shape it. Levels are then
    made non-decreasing by isotonic regression. All weights decay with the rounds: what is known of a source that the
    planner has stopped choosing fades back to its own word, and it gets another, cheap, try.
    """

    def __init__(self, num_sources: int) -> None:
        self.hits = np.zeros((num_sources, len(KNOTS)))  # float64, added to by `planner.tally_nodes`
        self.trials = np.zeros((num_sources, len(KNOTS)))
        self.levels = np.tile(KNOTS, (num_sources, 1))  # acceptance probability at each knot
        self._rounds = 0

    def probability(self, source: int, confidence: float) -> float:
        """Of one node; the planner's kernels read `levels` themselves."""
        return float(np.interp(confidence, KNOTS, self.levels[source]))

    def observe(self, source: int, confidence: np.ndarray, is_accepted: np.ndarray) -> None:
        """Take in verified nodes: confidence float [n] in [0, 1], is_accepted bool [n]."""
        for value, accepted in zip(confidence.tolist(), is_accepted.tolist(), strict=True):
            right = min(max(int(np.searchsorted(KNOTS, value, side="right")), 1), len(KNOTS) - 1)
            share = (value - KNOTS[right - 1]) / (KNOTS[right] - KNOTS[right - 1])
            for knot, weight in ((right - 1, 1.0 - share), (right, share)):
                self.trials[source, knot] += weight
                self.hits[source, knot] += weight * accepted

    def end_round(self) -> None:
        """Every few rounds: forget a little and fit the curves anew."""
        self._rounds += 1
        if self._rounds % _REFRESH_ROUNDS == 0:
            self.refresh()

    def refresh(self) -> None:
        scale = _DECAY * np.minimum(1.0, _MAX_WEIGHT / np.maximum(self.trials, 1e-9))
        self.trials *= scale
        self.hits *= scale
        promised = self.trials @ KNOTS
        ratio = np.clip((self.hits.sum(axis=1) + 2.0) / (promised + 2.0), 0.02, 4.0)
        prior = np.clip(ratio[:, None] * KNOTS, 0.0, 1.0)
        fitted = (self.hits + _PRIOR_STRENGTH * prior) / (self.trials + _PRIOR_STRENGTH)
        weights = self.trials + _PRIOR_STRENGTH
        falling = (np.diff(fitted, axis=1) < 0.0).any(axis=1)
        for source in range(len(fitted)):
            if falling[source]:
                fitted[source] = isotonic(fitted[source].tolist(), weights[source].tolist())
        self.levels = np.minimum(fitted, 1.0)
