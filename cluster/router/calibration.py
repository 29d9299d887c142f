"""Online calibration: which share of the nodes that a drafter proposes with some confidence is accepted."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable

import numba
import numpy as np

from cache_service.store.fair_share import first_to_give_way

# Finer near the ends: where a draft model is modest, nodes of long paths may be right at a confidence of 0.001, and 0.9
# differs from 0.97 after ten of them.
KNOTS = np.array([0.0, 1e-5, 1e-4, 1e-3, 5e-3, 0.02, 0.05, *np.arange(1, 10) / 10, 0.97, 1.0])

_PRIOR_STRENGTH = 6.0  # observations a knot's prior is worth
_MAX_WEIGHT = 96.0  # observations a knot remembers
_DECAY_ROUNDS = 8
_DECAY = 0.98  # factor on all weights: a source that was bad is tried again after some hundred rounds
_FIT_OBSERVATIONS = 16.0  # new observations after which curves are refitted

KNOT = np.dtype(
    [
        ("trials", "f8"),  # verified nodes with about this confidence, old ones decayed
        ("hits", "f8"),  # accepted nodes among them
        ("level", "f8"),  # acceptance probability that follows
    ]
)


@numba.njit(cache=True)
def isotonic(values, weights):  # type: ignore[no-untyped-def]
    """The non-decreasing array, float64 [n], with the least weighted squared distance to `values`; weights are > 0.

    Pool adjacent violators (Ayer et al. 1955): neighbours that fall are replaced by their weighted mean.
    """
    means, masses, counts = np.empty(len(values)), np.empty(len(values)), np.empty(len(values), np.int64)
    pools = 0
    for index in range(len(values)):
        mean, mass, count = values[index], weights[index], 1
        while pools and means[pools - 1] > mean:
            pools -= 1
            mean = (means[pools] * masses[pools] + mean * mass) / (masses[pools] + mass)
            mass += masses[pools]
            count += counts[pools]
        means[pools], masses[pools], counts[pools] = mean, mass, count
        pools += 1
    fitted = np.empty(len(values))
    end = 0
    for pool in range(pools):
        fitted[end : end + counts[pool]] = means[pool]
        end += counts[pool]
    return fitted


class Calibration:
    """confidence -> probability that the node is accepted, in `num_curves` curves, one for each kind of node.

    Every verified node is one observation, shared between the two knots around its confidence. A knot's level is
    (hits + prior) / (trials + prior strength), so that few samples move the whole curve and many shape it. The prior is
    the confidence times the ratio of accepted to expected nodes (the sum of confidences). For a source that expects too
    few, the error grows with depth, since its confidences are products of probabilities: its prior is the power of the
    confidence by which as many nodes are expected as were accepted. Levels are then made non-decreasing by isotonic
    regression. All weights decay with the rounds: the curve of a source that the planner no longer chooses returns to
    the source's own confidences, so that the planner tries it again.

    There is one set of curves for each group; group g's begin at g * num_curves. Groups are independent, and a round
    counts only for the groups that took part in it.
    """

    def __init__(self, num_curves: int, of_models: Collection[int] = ()) -> None:
        """With one group. of_models: curves of nodes whose confidences are products of a model's probabilities."""
        self._num_curves = num_curves
        self._of_models = np.isin(np.arange(num_curves), list(of_models))
        self.curves = _new_curves(num_curves)  # KNOT [curves, knots]; the planner's kernels read and add to them
        self._rounds = np.zeros(1, np.int64)  # by group
        self._fitted_weight = np.zeros(1)  # sum of all trials by group, when its curves were last fitted

    def add_group(self) -> None:
        self.curves = np.concatenate([self.curves, _new_curves(self._num_curves)])
        self._rounds = np.append(self._rounds, 0)
        self._fitted_weight = np.append(self._fitted_weight, 0.0)

    def forget(self, group: int) -> None:
        """Reset the group's curves to those of a new group."""
        self._of(group)[:] = _new_curves(self._num_curves)
        self._rounds[group] = 0
        self._fitted_weight[group] = 0.0

    def forget_curves(self, curves: Iterable[int]) -> None:
        """Reset these curves in every group."""
        for group in range(len(self._rounds)):
            own = self._of(group)
            for curve in curves:
                own[curve] = _new_curves(1)[0]
            self._fitted_weight[group] = _weight(own)

    def probability(self, curve: int, confidence: float) -> float:
        """The acceptance probability of one node. The planner's kernels read the curves themselves."""
        return float(np.interp(confidence, KNOTS, self.curves["level"][curve]))

    def observe(self, curve: int, confidence: np.ndarray, is_accepted: np.ndarray) -> None:
        """Take in verified nodes: confidence float [n] in [0, 1], is_accepted bool [n]."""
        for value, accepted in zip(confidence.tolist(), is_accepted.tolist(), strict=True):
            observe(value, accepted, self.curves[curve])

    def end_round(self, groups: np.ndarray | None = None) -> None:
        """Every few rounds decay the counts and refit the curves, at once if a round has many new observations: the
        first rounds of many sequences believe their drafters, and must not do so for long.

        groups: int [n], those that were in the round; None: all.
        """
        if groups is None:
            groups = np.arange(len(self._rounds))
        _end_round(self.curves, self._of_models, groups, self._rounds, self._fitted_weight)

    def refresh(self) -> None:
        """Decay the counts, and refit all curves."""
        for group in range(len(self._rounds)):
            self._fitted_weight[group] = _fit(self._of(group), self._of_models, _DECAY)

    def _of(self, group: int) -> np.ndarray:
        return self.curves[group * self._num_curves : (group + 1) * self._num_curves]


def _new_curves(count: int) -> np.ndarray:
    curves = np.zeros((count, len(KNOTS)), KNOT)
    curves["level"] = KNOTS
    return curves


@numba.njit(cache=True)
def _end_round(curves, of_models, groups, rounds, fitted_weight):  # type: ignore[no-untyped-def]
    num_curves = len(of_models)
    for group in groups:
        rounds[group] += 1
        own = curves[group * num_curves : (group + 1) * num_curves]
        is_time = rounds[group] % _DECAY_ROUNDS == 0
        if is_time or _weight(own) >= fitted_weight[group] + _FIT_OBSERVATIONS:
            fitted_weight[group] = _fit(own, of_models, _DECAY if is_time else 1.0)


@numba.njit(cache=True)
def _weight(curves):  # type: ignore[no-untyped-def]
    total = 0.0
    for curve in range(curves.shape[0]):
        for knot in range(curves.shape[1]):
            total += curves[curve, knot].trials
    return total


@numba.njit(cache=True)
def _fit(curves, of_models, decay):  # type: ignore[no-untyped-def]
    """Fit curves (KNOT [curves, knots]) anew, and return their weight. of_models: bool [curves]; decay: factor on what
    they remember."""
    levels, weights = np.empty(len(KNOTS)), np.empty(len(KNOTS))
    for curve in range(curves.shape[0]):
        knots = curves[curve]
        accepted, promised = 0.0, 0.0
        for index in range(len(KNOTS)):
            scale = decay * min(1.0, _MAX_WEIGHT / max(knots[index].trials, 1e-9))
            knots[index].trials *= scale
            knots[index].hits *= scale
            accepted += knots[index].hits
            promised += knots[index].trials * KNOTS[index]
        ratio, exponent = min(max((accepted + 2.0) / (promised + 2.0), 0.02), 4.0), 1.0
        if of_models[curve] and accepted > promised:
            ratio, exponent = 1.0, min(promised_power(knots.trials, knots.hits, 2.0), 1.0)
        for index in range(len(KNOTS)):
            prior = min(ratio * KNOTS[index] ** exponent, 1.0)
            weights[index] = knots[index].trials + _PRIOR_STRENGTH
            levels[index] = (knots[index].hits + _PRIOR_STRENGTH * prior) / weights[index]
        fitted = isotonic(levels, weights)
        for index in range(len(KNOTS)):
            knots[index].level = min(fitted[index], 1.0)
    return _weight(curves)


@numba.njit(cache=True)
def promised_power(trials, hits, strength):  # type: ignore[no-untyped-def]
    """The k with which the sum of confidence^k over the trials is the number of hits; both float64 [knots].

    strength: nodes of confidence 0.5, half of them right, that it begins with.
    """
    right = np.sum(hits) + strength * 0.5
    low, high = -5.0, 4.0  # of its logarithm
    for _ in range(16):
        middle = (low + high) / 2
        power = math.exp(middle)
        promised = strength * 0.5**power
        for index in range(len(KNOTS)):
            if trials[index]:
                promised += trials[index] * KNOTS[index] ** power
        if promised > right:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


@numba.njit(cache=True)
def _right_knot(value):  # type: ignore[no-untyped-def]
    """The knot to the right of a value, and where the value lies between it (1.0) and the knot before it (0.0)."""
    right = 1
    while right < len(KNOTS) - 1 and KNOTS[right] <= value:
        right += 1
    return right, (value - KNOTS[right - 1]) / (KNOTS[right] - KNOTS[right - 1])


@numba.njit(cache=True)
def interpolate(value, curve):  # type: ignore[no-untyped-def]
    """The acceptance probability of a confidence, by a curve (KNOT [knots])."""
    right, share = _right_knot(value)
    return curve[right - 1].level + share * (curve[right].level - curve[right - 1].level)


@numba.njit(cache=True)
def observe(value, is_accepted, curve):  # type: ignore[no-untyped-def]
    """Share one observation between the two knots around its confidence."""
    right, share = _right_knot(value)
    for knot, weight in ((right - 1, 1.0 - share), (right, share)):
        curve[knot].trials += weight
        if is_accepted:
            curve[knot].hits += weight


@numba.njit(cache=True)
def curve_of_sources(sources, is_only, num_sources):  # type: ignore[no-untyped-def]
    """The `by_sources` curve of nodes with these sources (one bit each). is_only: no other source may propose."""
    curve = num_sources
    if sources & (sources - 1) == 0:
        curve = num_sources + 1 if is_only else 0
        while sources >> 1:
            sources >>= 1
            curve += 1
    return curve


MAX_NAMESPACES = 64  # known at a time, beside those in a round


class NamespaceSlots:
    """Numbers for the namespaces in use. When they run out, the owner with most namespaces loses its least recently
    used one, but none of the last `num_spared`."""

    def __init__(self, num_spared: int, num_others: int = MAX_NAMESPACES) -> None:
        self._num_spared = num_spared
        self._capacity = num_spared + num_others
        self._slots: OrderedDict[str, int] = OrderedDict()

    def slot(self, namespace: str) -> tuple[int, bool]:
        """The namespace's number, and whether it is new."""
        found = self._slots.get(namespace)
        if found is not None:
            self._slots.move_to_end(namespace)
            return found, False
        free = len(self._slots)
        if free == self._capacity:
            free = self._slots.pop(first_to_give_way([*self._slots, namespace], num_spared=self._num_spared))
        self._slots[namespace] = free
        return free, True

    def known(self, namespace: str) -> int | None:
        """The namespace's number if it has one. Does not update the LRU order."""
        return self._slots.get(namespace)


class SourceCalibration:
    """The calibrations of draft sources, separate for each namespace.

    How many of its drafts a request verifies shows in how it is answered. So nothing that another namespace's traffic
    has taught may influence it, and a new namespace begins with the confidences that the sources report.

    The curves of a namespace are one group of each calibration; group 0 is there before any namespace is.

    by_sources: for merged nodes. Curve s is for nodes that source s proposes and others do not, curve num_sources for
    nodes of several sources. Curve num_sources + 1 + s is for sequences for which only source s may draft: a source's
    nodes that others do not propose are worse than its average.
    chain: a curve for each draft model, for its chains under the rejection rule.
    """

    def __init__(
        self,
        num_sources: int,
        max_sequences: int = 1,
        max_namespaces: int = MAX_NAMESPACES,
        num_chains: int = 1,
        models: Collection[int] = (),
    ) -> None:
        """max_sequences: of a round, each perhaps of another namespace; max_namespaces: that are known beside those;
        num_chains: draft models; models: sources that are models."""
        self.num_sources = num_sources
        alone = [num_sources + 1 + source for source in models]
        self.by_sources = Calibration(2 * num_sources + 1, of_models=[*models, *alone])
        self.chain = Calibration(num_chains, of_models=range(num_chains))
        self._num_chains = num_chains
        self._all = (self.by_sources, self.chain)
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

    def chain_curve(self, namespace: str, draft_model: int) -> int:
        """The curve of `chain` for this draft model's chains."""
        return self.group(namespace) * self._num_chains + draft_model

    def forget_source(self, source: int) -> None:
        """Drop the curves of a source in all namespaces; those that it shares with others are kept."""
        self.by_sources.forget_curves((source, self.num_sources + 1 + source))

    def forget_chains(self, draft_model: int) -> None:
        """Drop the curves of this draft model's chains in all namespaces."""
        self.chain.forget_curves((draft_model,))

    def drop(self, namespace: str) -> None:
        """Drop this namespace's curves."""
        slot = self._slots.known(namespace)
        if slot is not None:
            for calibration in self._all:
                calibration.forget(slot)

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
