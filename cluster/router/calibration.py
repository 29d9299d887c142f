"""What a drafter's confidence is worth, in which context, alone and beside others: learnt online, curve by curve."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cluster.router.context_class import MAX_NAMESPACES, NUM_RECORDS, NamespaceSlots
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

    The curves are there once for each of several groups, group g's from g * num_curves on. Groups know nothing of each
    other, and a round counts for those only that were in it.
    """

    def __init__(self, num_curves: int, general: Calibration | None = None) -> None:
        """With one group. general: one whose n curves are the priors of curves 0 to n - 1, of n to 2n - 1, and so on of
        the same group: what is known in general, where little is known of the special case."""
        self._num_curves = num_curves
        self._general = general
        self.hits = np.zeros((num_curves, len(KNOTS)))  # float64, added to by `planner.tally_nodes`
        self.trials = np.zeros((num_curves, len(KNOTS)))
        self.levels = np.tile(KNOTS, (num_curves, 1))  # acceptance probability at each knot
        self._rounds = np.zeros(1, np.int64)  # by group
        self._fitted_weight = np.zeros(1)  # of all trials of a group when its curves were fitted last

    def add_group(self) -> None:
        none = np.zeros((self._num_curves, len(KNOTS)))
        self.hits = np.concatenate([self.hits, none])
        self.trials = np.concatenate([self.trials, none])
        self.levels = np.concatenate([self.levels, np.tile(KNOTS, (self._num_curves, 1))])
        self._rounds = np.append(self._rounds, 0)
        self._fitted_weight = np.append(self._fitted_weight, 0.0)

    def forget(self, group: int) -> None:
        """Let the group's curves begin anew, as those that nobody has observed."""
        curves = slice(group * self._num_curves, (group + 1) * self._num_curves)
        self.hits[curves] = self.trials[curves] = 0.0
        self.levels[curves] = KNOTS
        self._rounds[group] = 0
        self._fitted_weight[group] = 0.0

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

    def end_round(self, groups: np.ndarray | None = None) -> None:
        """Every few rounds forget a little; and fit the curves anew, at once where a round has taught much: the first
        rounds of many sequences believe their drafters, and must not do so for long.

        groups: int [n], those that were in the round; None: all.
        """
        if groups is None:
            groups = np.arange(len(self._rounds))
        self._rounds[groups] += 1
        is_time = self._rounds[groups] % _DECAY_ROUNDS == 0
        weight = _sums(self._in_groups(self.trials)[groups])
        is_due = is_time | (weight >= self._fitted_weight[groups] + _FIT_OBSERVATIONS)
        if is_due.any():
            self.refresh(groups[is_due], np.where(is_time[is_due], _DECAY, 1.0))

    def refresh(self, groups: np.ndarray | None = None, decay: np.ndarray | float = _DECAY) -> None:
        """Fit the curves of groups (int [n]; None: all) anew. decay: of what they remember, one number or float [n]."""
        if groups is None:
            groups = np.arange(len(self._rounds))
        hits, trials = self._in_groups(self.hits)[groups], self._in_groups(self.trials)[groups]
        scale = np.reshape(decay, (-1, 1, 1)) * np.minimum(1.0, _MAX_WEIGHT / np.maximum(trials, 1e-9))
        trials *= scale
        hits *= scale
        self._in_groups(self.hits)[groups], self._in_groups(self.trials)[groups] = hits, trials
        self._fitted_weight[groups] = _sums(trials)
        if self._general is None:
            promised = (trials * KNOTS).sum(axis=2)
            ratio = np.clip((hits.sum(axis=2) + 2.0) / (promised + 2.0), 0.02, 4.0)
            prior = np.clip(ratio[:, :, None] * KNOTS, 0.0, 1.0)
        else:
            general = self._general
            prior = np.tile(general._in_groups(general.levels)[groups], (1, self._num_curves // general._num_curves, 1))
        fitted = ((hits + _PRIOR_STRENGTH * prior) / (trials + _PRIOR_STRENGTH)).reshape(-1, len(KNOTS))
        weights = (trials + _PRIOR_STRENGTH).reshape(-1, len(KNOTS))
        for curve in np.flatnonzero((np.diff(fitted, axis=1) < 0.0).any(axis=1)):
            fitted[curve] = isotonic(fitted[curve].tolist(), weights[curve].tolist())
        self._in_groups(self.levels)[groups] = np.minimum(fitted, 1.0).reshape(trials.shape)

    def _in_groups(self, curves: np.ndarray) -> np.ndarray:
        """A view, [groups, num_curves, knots]."""
        return curves.reshape(-1, self._num_curves, len(KNOTS))


def _sums(groups: np.ndarray) -> np.ndarray:
    """Of each group, float64 [groups]; to the last bit the same whichever others there are."""
    sums: np.ndarray = groups.reshape(len(groups), -1).sum(axis=1)
    return sums


class SourceCalibration:
    """The calibrations of draft sources, of each namespace by itself.

    How much of its drafts a request verifies shows in how it is answered. So nothing that another namespace's traffic
    has taught may have a part in it, and whoever is new begins with the sources' own word.

    The curves of a namespace are a group of each calibration; group 0 is there before any namespace is. `own` has a
    curve per source: what its confidence is worth on average. `in_context` has one per source and context class,
    `context * num_sources + source`, and begins with the average. A context class is a namespace and how the source has
    fared in the text so far, see `context_class`. `agreement` starts from there: curve s is for nodes that source s
    alone proposes, the last one for nodes of several sources. `chain` has one, for chains of the draft model under the
    rejection rule.
    """

    def __init__(self, num_sources: int, max_sequences: int = 1, max_namespaces: int = MAX_NAMESPACES) -> None:
        """max_sequences: of a round, each perhaps of another namespace; max_namespaces: that are known beside those."""
        self.num_sources = num_sources
        self.own = Calibration(num_sources)
        self.in_context = Calibration(num_sources * NUM_RECORDS, self.own)
        self.agreement = Calibration(num_sources + 1)
        self.chain = Calibration(1)
        self._all = (self.own, self.in_context, self.agreement, self.chain)  # a special one after its general one
        self._slots = NamespaceSlots(max_sequences, max_namespaces)
        self._num_groups = 1

    def group(self, namespace: str) -> int:
        """The namespace's group. The namespaces of one round have different ones."""
        slot, is_new = self._slots.slot(namespace)
        if is_new:
            for calibration in self._all:
                if slot == self._num_groups:
                    calibration.add_group()
                else:
                    calibration.forget(slot)
            self._num_groups = max(self._num_groups, slot + 1)
        return slot

    def drop(self, namespace: str) -> None:
        """Forget what was learnt in a namespace."""
        slot = self._slots.known(namespace)
        if slot is not None:
            for calibration in self._all:
                calibration.forget(slot)

    def first_context(self, namespace: str) -> int:
        """The first of a namespace's NUM_RECORDS context classes: that of AS_EXPECTED."""
        return self.group(namespace) * NUM_RECORDS

    def end_round(self, namespaces: Iterable[str] | None = None) -> None:
        """namespaces: those that were in the round; None: all."""
        groups = None
        if namespaces is not None:
            slots = {self._slots.known(namespace) for namespace in namespaces}
            known = sorted(slot for slot in slots if slot is not None)
            if not known:
                return
            groups = np.array(known, np.int64)
        for calibration in self._all:
            calibration.end_round(groups)
