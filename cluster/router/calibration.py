"""What a drafter's confidence is worth, in which context, alone and beside others: learnt online, curve by curve."""

from __future__ import annotations

import numpy as np

from cluster.router.context_class import NUM_RECORDS, NamespaceSlots
from cluster.router.isotonic import isotonic

# Finer near the ends: a node of 0.02 may still pay on an idle target, and 0.9 differs from 0.97 after ten of them.
KNOTS = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.0])

_PRIOR_STRENGTH = 6.0  # observations a knot's prior is worth
_MAX_WEIGHT = 96.0  # observations a knot remembers
_DECAY_ROUNDS = 8
_DECAY = 0.98  # of all weights, so often: a source that was bad is tried again after some hundred rounds
_FIT_OBSERVATIONS = 16.0  # new ones after which curves are fitted anew


class Calibration:
    """confidence -> probability that the node is accepted, in `num_curves` curves, one for each kind of node.

    Every verified node is one observation, shared between the two knots around its confidence. A knot's level is
    (hits + prior) / (trials + prior strength), where the prior is the confidence itself times the curve's overall
    ratio of accepted to promised nodes, so that few samples move the whole curve and many shape it. Levels are then
    made non-decreasing by isotonic regression. All weights decay with the rounds: what is known of a source that the
    planner has stopped choosing fades back to its own word, and it gets another, cheap, try.
    """

    def __init__(self, num_curves: int, general: Calibration | None = None) -> None:
        """general: one whose n curves are the priors of curves 0 to n - 1, of n to 2n - 1, and so on: what is known in
        general, where little is known of the special case."""
        self._general = general
        self.hits = np.zeros((num_curves, len(KNOTS)))  # float64, added to by `planner.tally_nodes`
        self.trials = np.zeros((num_curves, len(KNOTS)))
        self.levels = np.tile(KNOTS, (num_curves, 1))  # acceptance probability at each knot
        self._rounds = 0
        self._fitted_weight = 0.0  # of all trials when the curves were fitted last

    def grow(self, num_curves: int) -> None:
        """Have at least so many curves."""
        more = num_curves - len(self.levels)
        if more > 0:
            self.hits = np.concatenate([self.hits, np.zeros((more, len(KNOTS)))])
            self.trials = np.concatenate([self.trials, np.zeros((more, len(KNOTS)))])
            self.levels = np.concatenate([self.levels, np.tile(KNOTS, (more, 1))])

    def forget(self, first: int, end: int) -> None:
        """Let curves first to end - 1 begin anew, as what is known in general has it."""
        self.hits[first:end] = self.trials[first:end] = 0.0
        general = KNOTS[None] if self._general is None else self._general.levels
        self.levels[first:end] = general[np.arange(first, end) % len(general)]

    def probability(self, curve: int, confidence: float) -> float:
        """Of one node; the planner's kernels read `levels` themselves."""
        return float(np.interp(confidence, KNOTS, self.levels[curve]))

    def observe(self, curve: int, confidence: np.ndarray, is_accepted: np.ndarray) -> None:
        """Take in verified nodes: confidence float [n] in [0, 1], is_accepted bool [n]."""
        for value, accepted in zip(confidence.tolist(), is_accepted.tolist(), strict=True):
            right = min(max(int(np.searchsorted(KNOTS, value, side="right")), 1), len(KNOTS) - 1)
            share = (value - KNOTS[right - 1]) / (KNOTS[right] - KNOTS[right - 1])
            for knot, weight in ((right - 1, 1.0 - share), (right, share)):
                self.trials[curve, knot] += weight
                self.hits[curve, knot] += weight * accepted

    def end_round(self) -> None:
        """Every few rounds forget a little; and fit the curves anew, at once where a round has taught much: the first
        rounds of many sequences believe their drafters, and must not do so for long."""
        self._rounds += 1
        is_time = self._rounds % _DECAY_ROUNDS == 0
        if is_time or self.trials.sum() >= self._fitted_weight + _FIT_OBSERVATIONS:
            self.refresh(_DECAY if is_time else 1.0)

    def refresh(self, decay: float = _DECAY) -> None:
        scale = decay * np.minimum(1.0, _MAX_WEIGHT / np.maximum(self.trials, 1e-9))
        self.trials *= scale
        self.hits *= scale
        self._fitted_weight = float(self.trials.sum())
        if self._general is None:
            promised = self.trials @ KNOTS
            ratio = np.clip((self.hits.sum(axis=1) + 2.0) / (promised + 2.0), 0.02, 4.0)
            prior = np.clip(ratio[:, None] * KNOTS, 0.0, 1.0)
        else:
            prior = np.tile(self._general.levels, (len(self.levels) // len(self._general.levels), 1))
        fitted = (self.hits + _PRIOR_STRENGTH * prior) / (self.trials + _PRIOR_STRENGTH)
        weights = self.trials + _PRIOR_STRENGTH
        falling = (np.diff(fitted, axis=1) < 0.0).any(axis=1)
        for curve in range(len(fitted)):
            if falling[curve]:
                fitted[curve] = isotonic(fitted[curve].tolist(), weights[curve].tolist())
        self.levels = np.minimum(fitted, 1.0)


class SourceCalibration:
    """The calibrations of draft sources.

    `own` has a curve per source: what its confidence is worth on average. `in_context` has one per source and context
    class, `context * num_sources + source`, and begins with the average. A context class is a namespace and how the
    source has fared in the text so far, see `context_class`. `agreement` starts from there: curve s is for
    nodes that source s alone proposes, the last one for nodes of several sources.
    """

    def __init__(self, num_sources: int) -> None:
        self.own = Calibration(num_sources)
        self.in_context = Calibration(num_sources * NUM_RECORDS, self.own)
        self.agreement = Calibration(num_sources + 1)
        self._slots = NamespaceSlots()

    def first_context(self, namespace: str) -> int:
        """The first of a namespace's NUM_RECORDS context classes: that of AS_EXPECTED."""
        slot, is_new = self._slots.slot(namespace)
        if is_new:
            per_namespace = NUM_RECORDS * len(self.own.levels)
            self.in_context.grow((slot + 1) * per_namespace)
            self.in_context.forget(slot * per_namespace, (slot + 1) * per_namespace)
        return slot * NUM_RECORDS

    def end_round(self) -> None:
        self.own.end_round()
        self.in_context.end_round()
        self.agreement.end_round()
