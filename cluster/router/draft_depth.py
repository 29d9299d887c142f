"""How far draft workers and the target's head should draft: down to the confidence at which one more forward pays.

A forward of the draft model or head after a node of confidence c adds a child. The child is accepted with probability
p(c) * a, where p is the measured acceptance of nodes of that confidence and a the share of right nodes whose child is
right, too. It pays if it brings more tokens than the round would emit anyway in the time that it takes: its part of the
forward, and its row in the target's forward.

Learnt from what was drafted and what the target then said, whether it was verified or not. So what is learnt does not
depend on what the planner chose.

Under `acceptance: rejection` the confidence of drawn tokens must not decide. A long draft is late more often than a
short one, and a late one is not verified: drafts would be verified or not by their tokens, and the text would leave the
target's law. There the depth is set before anything is drawn, by `a` alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numba
import numpy as np

from actors.draft_tree import DraftTree
from cluster.router.calibration import KNOTS, Calibration, observe

_WEIGHT = 0.1  # of a new measurement of the draft model's time
_DECAY = 0.98  # of counts, with each answer
_PRIOR = 4.0  # nodes that the first guess of `a` counts as
_FIRST_SHARE = 0.7
_NOTHING = np.empty(0, np.int32)


@dataclass(slots=True)
class DraftDepth:
    """What rounds of one namespace, or mixed rounds, have shown."""

    level_s: float = 0.0  # typical time of a draft worker for one level of its trees
    _curve: Calibration = field(default_factory=lambda: Calibration(1))
    _right: float = 0.0  # children that were right, of right nodes with children
    _tried: float = 0.0

    def min_confidence(self, tokens_per_s: float, num_sequences: int, row_price: float) -> float:
        """Least confidence of a node to draft after. tokens_per_s: what rounds emit, of all sequences; num_sequences:
        those that are drafted for at once; row_price: tokens that a row must bring to be worth verifying."""
        return self._confidence_at(self._price(tokens_per_s, num_sequences, row_price) / max(self._share, 1e-3))

    def paying_levels(self, tokens_per_s: float, num_sequences: int, row_price: float, most: int) -> int:
        """Levels that pay on average, at least 1 and at most `most`, whatever their confidence. The token at depth d is
        taken to be accepted with probability a^d. Other arguments as for `min_confidence`."""
        price = self._price(tokens_per_s, num_sequences, row_price)
        levels = 1
        while levels < most and self._share ** (levels + 1) >= price:
            levels += 1
        return levels

    def _price(self, tokens_per_s: float, num_sequences: int, row_price: float) -> float:
        """Tokens that one more level must bring to each sequence."""
        return tokens_per_s * self.level_s / max(1, num_sequences) + row_price

    @property
    def _share(self) -> float:
        """`a`, in (0, 1)."""
        return (self._right + _PRIOR * _FIRST_SHARE) / (self._tried + _PRIOR)

    def _confidence_at(self, probability: float) -> float:
        """The least confidence whose nodes are accepted with this probability; 1 if none are."""
        levels = self._curve.curves["level"][0]
        index = int(np.searchsorted(levels, probability))  # the first knot that reaches it
        if index == 0:
            return 0.0
        if index == len(levels):
            return 1.0
        below, above = levels[index - 1], levels[index]
        part = (probability - below) / (above - below)
        return float(KNOTS[index - 1] + part * (KNOTS[index] - KNOTS[index - 1]))

    def observe_answer(self, elapsed_s: float, num_levels: int, *, is_parallel: bool = False) -> None:
        """Take in how long a worker took for trees of so many levels. Times that are none are ignored. is_parallel: one
        forward gave all levels, so that one more costs hardly anything."""
        if num_levels < 1 or not 0.0 <= elapsed_s < math.inf:
            return
        measured = 0.0 if is_parallel else elapsed_s / num_levels
        self.level_s += (measured - self.level_s) * (_WEIGHT if self.level_s else 1.0)

    def observe_tree(self, tree: DraftTree, emitted: np.ndarray) -> None:
        """Take in a worker's tree and the tokens that the target then emitted, int32. A tree that breaks the promises
        of `DraftTree` is ignored.

        Nodes beyond the emitted tokens are not judged, unless they follow a wrong one.
        """
        is_right, levels = judge(tree, emitted)
        if not levels:
            return
        _, parents, confidence = _copied(tree)
        judged, tried, right = _learn(is_right, parents, confidence, self._curve.curves[0])
        if not judged:
            return
        self._curve.end_round()
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


def num_levels(tree: DraftTree) -> int:
    """Nodes of the longest path; 0 for a tree that is not sound."""
    return judge(tree, _NOTHING)[1]


def warm_up() -> None:
    """Compile or load the kernels, so that no request waits for them."""
    DraftDepth().observe_tree(DraftTree.chain(np.zeros(1, np.int32), np.ones(1, np.float32)), np.zeros(1, np.int32))


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
def _learn(is_right, parents, confidence, curve):  # type: ignore[no-untyped-def]
    """Add the judged nodes to a calibration curve. Returns how many there are, how many right nodes have a judged
    child, and how many of those have a right one."""
    judged, tried, right = 0, 0, 0
    of_children = np.full(len(parents), -1, np.int8)  # 1: one is right, 0: all that are judged are wrong
    for node in range(len(parents)):
        if is_right[node] < 0:
            continue
        judged += 1
        observe(confidence[node], is_right[node], curve)
        if parents[node] >= 0 and is_right[parents[node]] == 1:
            of_children[parents[node]] = max(of_children[parents[node]], is_right[node])
    for node in range(len(parents)):
        tried += of_children[node] >= 0
        right += of_children[node] == 1
    return judged, tried, right
