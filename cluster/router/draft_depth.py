"""How far draft workers and the target's head should draft: down to the confidence at which one more forward pays.

A forward of the draft model or head after a node of confidence c adds a child. The child is accepted with probability
p(c) * a, where p is the measured acceptance of nodes of that confidence and a the share of right nodes whose child is
also right. A forward pays if all its nodes together gain more tokens than the round would emit without it in the same
time. A node is expanded if its child gains more than its row in the target's forward costs.

Both are learnt from all drafted nodes and the target's tokens, including nodes that were not verified. So they do not
depend on the planner's choices.

A confidence is a product of the draft model's probabilities of single tokens. If these are too low or too high, the
error grows with depth. So with few observations p(c) = c^k, as if a token of probability s were right with probability
s^k. Every observed token is evidence for k, and so for all depths.

Under `acceptance: rejection` the confidence of drawn tokens must not decide. A long draft is late more often than a
short one, and a late draft is not verified: verification would depend on the drawn tokens, and the text would not
follow the target's distribution. There the depth is set before anything is drawn, by `a` alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numba
import numpy as np

from actors.draft_tree import DraftTree
from actors.draft_worth import no_worth
from cluster.router.calibration import KNOTS, isotonic, promised_power

_WEIGHT = 0.1  # of a new measurement of the draft model's time
_DECAY = 0.98  # of counts, with each tree
_PRIOR = 4.0  # nodes that a first guess counts as: of `a`, of k, and of each knot's acceptance
_FIRST_SHARE = 0.7
_FIRST_LEVEL = 0.1  # time of a draft forward, as a share of the target's, before one was measured
_TRIALS, _HITS = 0, 1  # rows of counts: judged nodes with about a knot's confidence, and right ones among them


class DraftCosts(NamedTuple):
    """Costs against which further drafting is weighed in a round."""

    tokens_per_s: float  # emitted by such rounds
    row_price: float  # tokens that a row must bring to be worth verifying
    target_s: float  # time of the target's forward without drafts


@dataclass(slots=True)
class DraftDepth:
    """What rounds of one namespace, or mixed rounds, have shown."""

    level_s: float | None = None  # typical time of a forward of the draft model or head; None: not known
    _paths: np.ndarray = field(default_factory=lambda: np.zeros((2, len(KNOTS))))  # nodes by confidence
    _tokens: np.ndarray = field(default_factory=lambda: np.zeros((2, len(KNOTS))))  # those after right ones, by share
    _levels: np.ndarray | None = None  # p at the knots; None: to be fitted
    _right: float = 0.0  # children that were right, of right nodes with children
    _tried: float = 0.0

    def min_confidence(self, row_price: float) -> float:
        """Least confidence of a node to draft after, in a forward that is made anyway. row_price: see
        `DraftCosts`."""
        return self._confidence_at(row_price / max(self._share, 1e-3))

    def worth(self, costs: DraftCosts, part: float = 1.0) -> np.ndarray:
        """Gain of nodes as a share of the price of a forward, as in `draft_worth.pays`. part: of the round's sequences
        that the forward serves; others are drafted for at the same time."""
        price = self._price(costs) * part
        if price <= 0.0:
            return no_worth()
        gain = np.maximum(0.0, self._acceptance() * self._share - costs.row_price)
        return np.concatenate([KNOTS, gain / price]).astype(np.float32)

    def paying_levels(self, costs: DraftCosts, num_sequences: int, most: int) -> int:
        """Number of levels that pay on average, at least 1 and at most `most`, independent of confidences. The token at
        depth d is taken to be accepted with probability a^d. num_sequences: those that are drafted for at once."""
        price = self._price(costs) / max(1, num_sequences) + costs.row_price
        levels = 1
        while levels < most and self._share ** (levels + 1) >= price:
            levels += 1
        return levels

    def _price(self, costs: DraftCosts) -> float:
        """Tokens that the round would emit in the time of a forward."""
        level_s = _FIRST_LEVEL * costs.target_s if self.level_s is None else self.level_s
        return costs.tokens_per_s * level_s

    @property
    def _share(self) -> float:
        """`a`, in (0, 1)."""
        return (self._right + _PRIOR * _FIRST_SHARE) / (self._tried + _PRIOR)

    def _acceptance(self) -> np.ndarray:
        """p at the knots, float64, non-decreasing."""
        if self._levels is None:
            self._levels = _fit(self._paths, self._tokens)
        return self._levels

    def _confidence_at(self, probability: float) -> float:
        """The least confidence whose nodes are accepted with this probability; 1 if none are."""
        levels = self._acceptance()
        index = int(np.searchsorted(levels, probability))  # the first knot that reaches it
        if index == 0:
            return 0.0
        if index == len(levels):
            return 1.0
        below, above = levels[index - 1], levels[index]
        part = (probability - below) / (above - below)
        return float(KNOTS[index - 1] + part * (KNOTS[index] - KNOTS[index - 1]))

    def observe_answer(self, elapsed_s: float, num_forwards: int, *, is_parallel: bool = False) -> None:
        """Take in how long a worker took for so many forwards. Times that are none are ignored. is_parallel: one
        forward gives all levels, so that one more costs hardly anything."""
        if num_forwards < 1 or not 0.0 <= elapsed_s < math.inf:
            return
        measured = 0.0 if is_parallel else elapsed_s / num_forwards
        self.level_s = measured if self.level_s is None else self.level_s + (measured - self.level_s) * _WEIGHT

    def observe_tree(self, tree: DraftTree, emitted: np.ndarray) -> None:
        """Take in a worker's tree and the tokens that the target then emitted, int32. A tree that breaks the promises
        of `DraftTree` is ignored.

        Nodes beyond the emitted tokens are not judged, unless they follow a wrong one.
        """
        is_right, levels = judge(tree, emitted)
        if not levels:
            return
        _, parents, confidence = _copied(tree)
        tried, right = _learn(is_right, parents, confidence, self._paths, self._tokens)
        self._levels = None
        self._tried = self._tried * _DECAY + tried
        self._right = self._right * _DECAY + right


def judge(tree: DraftTree, emitted: np.ndarray) -> tuple[np.ndarray, int]:
    """Whether each node is on the emitted path, int8 [n]: 1 or 0, -1: not known; and the nodes of the longest path, 0
    for a tree that breaks the promises of `DraftTree`. emitted: int32."""
    is_right = np.empty(len(tree), np.int8)
    if not len(tree.token_ids) == len(tree.parents) == len(tree.confidence):
        return is_right, 0
    return is_right, _judge(*_copied(tree), np.array(emitted, np.int32), is_right)


def num_right(tree: DraftTree, emitted: np.ndarray) -> int:
    """Nodes of a tree that the target has emitted; 0 for a tree that is not sound. emitted: int32."""
    is_right, levels = judge(tree, emitted)
    return int((is_right == 1).sum()) if levels else 0


def warm_up() -> None:
    """Compile or load the kernels, so that no request waits for them."""
    depth = DraftDepth()
    depth.observe_tree(DraftTree.chain(np.zeros(1, np.int32), np.ones(1, np.float32)), np.zeros(1, np.int32))
    depth.min_confidence(0.0)


def _copied(tree: DraftTree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, parents and confidence. Arrays of messages cannot be written to; kernels would be compiled for them
    again."""
    return np.array(tree.token_ids, np.int32), np.array(tree.parents, np.int32), np.array(tree.confidence, np.float32)


@numba.njit(cache=True)
def _judge(token_ids, parents, confidence, emitted, is_right):  # type: ignore[no-untyped-def]
    """Fill `is_right`, and return the nodes of the longest path, as of `judge`."""
    depths = np.empty(len(token_ids), np.int32)
    deepest = 0
    for node in range(len(token_ids)):
        parent = parents[node]
        if not -1 <= parent < node or not 0.0 <= confidence[node] <= 1.0:
            return 0
        depth = depths[parent] + 1 if parent >= 0 else 0
        depths[node] = depth
        deepest = max(deepest, depth + 1)
        before = is_right[parent] if parent >= 0 else 1
        if before != 1:
            is_right[node] = before
        else:
            is_right[node] = emitted[depth] == token_ids[node] if depth < len(emitted) else -1
    return deepest


@numba.njit(cache=True)
def _learn(is_right, parents, confidence, paths, tokens):  # type: ignore[no-untyped-def]
    """Add the judged nodes to `paths`, by confidence, and those after right ones to `tokens`, by share; float64
    [2, knots] each. Returns how many right nodes have a judged child, and how many of those have a right one."""
    paths *= _DECAY
    tokens *= _DECAY
    tried, right = 0, 0
    of_children = np.full(len(parents), -1, np.int8)  # 1: one is right, 0: all that are judged are wrong
    for node in range(len(parents)):
        if is_right[node] < 0:
            continue
        _count(confidence[node], is_right[node], paths)
        parent = parents[node]
        if parent < 0 or is_right[parent] == 1:
            before = confidence[parent] if parent >= 0 else 1.0
            _count(min(1.0, confidence[node] / before) if before > 0.0 else 0.0, is_right[node], tokens)
        if parent >= 0 and is_right[parent] == 1:
            of_children[parent] = max(of_children[parent], is_right[node])
    for node in range(len(parents)):
        tried += of_children[node] >= 0
        right += of_children[node] == 1
    return tried, right


@numba.njit(cache=True)
def _count(value, is_right, counts):  # type: ignore[no-untyped-def]
    """Share an observation between the two knots around its value."""
    right_knot = max(1, np.searchsorted(KNOTS, value))
    left = KNOTS[right_knot - 1]
    part = (value - left) / (KNOTS[right_knot] - left)
    for knot, weight in ((right_knot, part), (right_knot - 1, 1.0 - part)):
        counts[_TRIALS, knot] += weight
        counts[_HITS, knot] += weight * is_right


@numba.njit(cache=True)
def _fit(paths, tokens):  # type: ignore[no-untyped-def]
    """Estimate of p at the knots, shrunk to c^k and non-decreasing: float64 [knots]."""
    expected = KNOTS ** promised_power(tokens[_TRIALS], tokens[_HITS], _PRIOR)
    weights = paths[_TRIALS] + _PRIOR
    return isotonic((paths[_HITS] + _PRIOR * expected) / weights, weights)
