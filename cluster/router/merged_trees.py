"""Merges the draft trees of all sources into one tree per sequence: equal prefixes become one node.

Three sources propose for one sequence. A node of theirs is a token with its confidence; a node of the merged tree is a
token with its probability, before the calibration, and its sources:

    a: suffix      b: soft_ngram    c: draft_model         merged tree

    the .8         the .6           a .1                   +- the .86  {a, b}
     +- cat .6      +- cat .4                              |   +- cat .66  {a, b}
     |   +- sat .5  +- dog .1                              |   |   +- sat .5  {a}
                                                           |   +- dog .1  {b}
                                                           +- a .1  {c}

`the` lies halfway between the greater confidence, 0.8, and the noisy-or of both, 1 - 0.2 * 0.4 = 0.92.

All nodes of a round are in one flat structured array, so a round needs a few array operations for any number of trees.
Nothing here knows requests or workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np

from actors.draft_tree import DraftTree
from cluster.router.calibration import SourceCalibration, curve_of_sources, interpolate

MAX_SOURCES = 62  # one bit each in a node's source mask

SEQUENCE = np.dtype(
    [
        ("max_depth", "i4"),  # tokens that it may still emit, less the target's own
        ("stop_start", "i4"),  # its stop tokens are stop_tokens[stop_start:stop_end]
        ("stop_end", "i4"),
        ("group", "i4"),  # calibration group of its namespace
        ("is_only", "?"),  # one source alone may draft for it
    ],
    align=True,
)

PROPOSED_TREE = np.dtype(
    [
        ("start", "i4"),  # its nodes are nodes[start:end] of the proposed nodes
        ("end", "i4"),
        ("sequence", "i4"),  # index in the round; trees are ordered by it
        ("source", "i4"),
        ("is_valid", "?"),  # whether it keeps the promises of `DraftTree`; set by merging
    ],
    align=True,
)

PROPOSED_NODE = np.dtype(
    [
        ("token_id", "i4"),
        ("parent", "i4"),  # within its tree; -1: child of the root
        ("confidence", "f4"),  # merging makes it 0 for what is no guess, and at most the parent's
        ("is_required", "?"),
        # Set by merging:
        ("ends_text", "?"),  # a stop token, or behind one
        ("merged", "i4"),  # index in the merged nodes; -1: left out
    ],
    align=True,
)

MERGED_NODE = np.dtype(
    [
        ("token_id", "i4"),
        ("parent", "i4"),  # within its sequence; -1: child of the root. Parents come before children
        ("depth", "i4"),  # children of the root have 1
        ("best_source", "i4"),  # the source that was most sure of the node; it gets the credit
        ("best_confidence", "f8"),  # that source's
        ("sources", "i8"),  # bit s is set where source s proposed the node as a guess
        ("uncalibrated_probability", "f8"),  # combined from all its sources
        ("probability", "f8"),  # that it is on the accepted path
        ("curve", "i4"),  # that it is calibrated by, and teaches
        ("is_required", "?"),  # computed whether it pays or not; so are its parents
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class Proposal:
    """One source's tree for one sequence of the round."""

    sequence: int  # index of the sequence in the round; proposals are ordered by it
    source: int  # index of the source in the calibration
    tree: DraftTree
    group: int = 0  # calibration group of the sequence's namespace
    is_only: bool = False  # no other source may draft for the sequence


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """What bounds the drafts of the round's sequences; all arrays are int32 [number of sequences]."""

    max_nodes: np.ndarray
    max_depth: np.ndarray  # tokens that the sequence may still emit, less the target's own
    stop_tokens: np.ndarray  # int32, those of all sequences one after the other
    stop_start: np.ndarray  # int32 [number of sequences + 1]: where each sequence's begin in stop_tokens


@dataclass(frozen=True, slots=True)
class MergedTrees:
    """One tree per sequence, flat. Siblings are distinct, neither probability rises from parent to child, and the
    uncalibrated probabilities of a node's children together are at most the node's."""

    start: np.ndarray  # int32 [sequences + 1]: where each sequence's nodes begin
    nodes: np.ndarray  # MERGED_NODE [n]

    def __len__(self) -> int:
        return len(self.nodes)

    def tree(self, index: int) -> DraftTree:
        """The tree of a sequence, with the calibrated probabilities."""
        nodes = self.nodes[self.start[index] : self.start[index + 1]]
        return DraftTree(
            np.ascontiguousarray(nodes["token_id"]),
            np.ascontiguousarray(nodes["parent"]),
            nodes["probability"].astype(np.float32),
        )

    @staticmethod
    def empty(num_sequences: int) -> MergedTrees:
        return MergedTrees(np.zeros(num_sequences + 1, np.int32), np.empty(0, MERGED_NODE))


def has_tree_shape(tree: DraftTree, max_nodes: int, max_required: int = 0) -> bool:
    """Whether the arrays may be handed to the kernels; values are checked there. max_nodes: those that are not
    required."""
    token_ids, parents, confidence, required = tree.token_ids, tree.parents, tree.confidence, tree.required
    if required is not None:
        if not isinstance(required, np.ndarray) or required.dtype != np.bool_ or required.ndim != 1:
            return False
        num_required = int(np.count_nonzero(required))
        if num_required > max_required or len(required) != len(token_ids):
            return False
        max_nodes += num_required
    return (
        isinstance(token_ids, np.ndarray)
        and isinstance(parents, np.ndarray)
        and isinstance(confidence, np.ndarray)
        and token_ids.dtype == np.int32
        and parents.dtype == np.int32
        and confidence.dtype == np.float32
        and token_ids.ndim == 1
        and len(token_ids) <= max_nodes
        and token_ids.shape == parents.shape
        and token_ids.shape == confidence.shape
    )


def merge_trees(
    proposals: Sequence[Proposal], limits: SequenceLimits, calibration: SourceCalibration, vocab_size: int
) -> tuple[MergedTrees, np.ndarray]:
    """(one tree per sequence out of the trees of all sources; bool [proposals]: whether a tree was valid). Trees must
    have passed `has_tree_shape`.

    1. A confidence counts at most as much as the parent's.
    2. Where sources agree, the probability lies halfway between the greatest of their confidences (they know the same)
       and the noisy-or of them (they know nothing of each other).
    3. Children that together exceed their parent are scaled down to it: `uncalibrated_probability`.
    4. Calibration: `probability`, by the curve of the node's only source, or by one curve for all nodes that have
       several (`SourceCalibration.by_sources`); at most the parent's.

    Left out are a tree that breaks its invariants; stop tokens and what follows them, because the target emits a stop
    token by itself and nothing after it is ever shown; and nodes deeper than max_depth, for which there may be no
    position. A required stop token stays, because its drafter reads the target's prediction there. A required node is
    no guess if its confidence is 0, or if the text has ended: then its source does not count in the node's probability.
    """
    num_sequences = len(limits.max_nodes)
    if not proposals:
        return MergedTrees.empty(num_sequences), np.zeros(0, np.bool_)
    sequences = np.zeros(num_sequences, SEQUENCE)
    sequences["max_depth"] = limits.max_depth
    sequences["stop_start"], sequences["stop_end"] = limits.stop_start[:-1], limits.stop_start[1:]
    owners = [proposal.sequence for proposal in proposals]
    sequences["group"][owners] = [proposal.group for proposal in proposals]
    sequences["is_only"][owners] = [proposal.is_only for proposal in proposals]
    trees, proposed = _flat(proposals)
    start, nodes = _merge(trees, proposed, sequences, limits.stop_tokens, vocab_size)
    _calibrate(start, nodes, sequences, calibration.by_sources.curves, calibration.num_sources)
    return MergedTrees(start, nodes), trees["is_valid"]


def best_paths(merged: MergedTrees) -> MergedTrees:
    """Reduce each tree to a chain: the path from the root on which most tokens are expected to be accepted."""
    if not len(merged):
        return merged
    start, nodes = keep_nodes(merged.start, merged.nodes, _on_best_paths(merged.start, merged.nodes))
    return MergedTrees(start, nodes)


def _flat(proposals: Sequence[Proposal]) -> tuple[np.ndarray, np.ndarray]:
    """The proposals as PROPOSED_TREE and PROPOSED_NODE arrays."""
    trees = np.zeros(len(proposals), PROPOSED_TREE)
    trees["end"] = np.cumsum([len(proposal.tree.token_ids) for proposal in proposals])
    trees["start"][1:] = trees["end"][:-1]
    trees["sequence"] = [proposal.sequence for proposal in proposals]
    trees["source"] = [proposal.source for proposal in proposals]
    nodes = np.zeros(trees["end"][-1], PROPOSED_NODE)
    nodes["token_id"] = np.concatenate([proposal.tree.token_ids for proposal in proposals])
    nodes["parent"] = np.concatenate([proposal.tree.parents for proposal in proposals])
    nodes["confidence"] = np.concatenate([proposal.tree.confidence for proposal in proposals])
    for (start, end), proposal in zip(trees[["start", "end"]].tolist(), proposals, strict=True):
        if proposal.tree.required is not None:
            nodes["is_required"][start:end] = proposal.tree.required
    return trees, nodes


@numba.njit(cache=True)
def _on_best_paths(start, nodes):  # type: ignore[no-untyped-def]
    """bool [n]: whether a node is on its sequence's best path."""
    is_on = np.zeros(len(nodes), np.bool_)
    for s in range(len(start) - 1):
        tree = nodes[start[s] : start[s + 1]]
        # Expected accepted tokens of the best path that begins with each node
        tokens = tree["probability"].copy()
        best, best_child = -1, np.full(len(tree), -1, np.int32)
        best_behind = np.zeros(len(tree))
        for m in range(len(tree) - 1, -1, -1):  # children come after their parents
            tokens[m] += best_behind[m]
            parent = tree[m].parent
            if parent < 0:
                if best < 0 or tokens[m] >= tokens[best]:
                    best = m
            elif best_child[parent] < 0 or tokens[m] >= best_behind[parent]:
                best_child[parent], best_behind[parent] = m, tokens[m]
        while best >= 0:
            is_on[start[s] + best] = True
            best = best_child[best]
    return is_on


@numba.njit(cache=True)
def keep_nodes(start, nodes, is_kept):  # type: ignore[no-untyped-def]
    """(start, kept nodes) of a `MergedTrees`; the parents of a kept node are kept."""
    new_index = np.full(len(nodes), -1, np.int32)
    new_start = np.zeros(len(start), np.int32)
    kept = nodes[is_kept]
    count = 0
    for s in range(len(start) - 1):
        for m in range(start[s], start[s + 1]):
            if is_kept[m]:
                new_index[m] = count
                if nodes[m].parent >= 0:
                    kept[count].parent = new_index[start[s] + nodes[m].parent] - new_start[s]
                count += 1
        new_start[s + 1] = count
    return new_start, kept


@numba.njit(cache=True)
def _is_valid(nodes, vocab_size):  # type: ignore[no-untyped-def]
    """Whether the nodes of one tree keep the promises of `DraftTree`."""
    for i in range(len(nodes)):
        node = nodes[i]
        if node.token_id < 0 or node.token_id >= vocab_size or node.parent < -1 or node.parent >= i:
            return False
        if not (node.confidence >= 0.0 and node.confidence <= 1.0):  # also refuses NaN
            return False
        if node.is_required and node.parent >= 0 and not nodes[node.parent].is_required:
            return False
        # Quadratic, but trees are small (max_draft_tokens).
        for j in range(i):
            if nodes[j].parent == node.parent and nodes[j].token_id == node.token_id:
                return False
    return True


@numba.njit(cache=True)
def _merge(trees, proposed, sequences, stop_tokens, vocab_size):  # type: ignore[no-untyped-def]
    """Steps 1 and 2 of `merge_trees`: (start, MERGED_NODE array). Sets what `trees` and `proposed` say is set here."""
    num_sequences = len(sequences)
    nodes = np.zeros(len(proposed), MERGED_NODE)
    start = np.zeros(num_sequences + 1, np.int32)
    # Children as linked lists. Lists 0 to num_sequences - 1 are those of the roots, the others those of the nodes.
    first_child = np.full(num_sequences + len(proposed), -1, np.int32)
    next_sibling = np.full(len(proposed), -1, np.int32)
    count = 0
    sequence = 0
    for t in range(len(trees)):
        tree = trees[t]
        while sequence < tree.sequence:
            sequence += 1
            start[sequence] = count
        limits = sequences[sequence]
        tree.is_valid = _is_valid(proposed[tree.start : tree.end], vocab_size)
        for i in range(tree.start, tree.end):
            node = proposed[i]
            node.merged = -1
            if not tree.is_valid:
                continue
            parent, depth = -1, 1
            is_guess = not node.is_required or node.confidence > 0.0
            if node.parent >= 0:
                above = proposed[tree.start + node.parent]
                if above.merged < 0:
                    continue
                parent, depth = above.merged, nodes[above.merged].depth + 1
                node.ends_text = above.ends_text
                node.confidence = min(node.confidence, above.confidence)
            for j in range(limits.stop_start, limits.stop_end):
                if stop_tokens[j] == node.token_id:
                    node.ends_text = True
            if depth > limits.max_depth or (node.ends_text and not node.is_required):
                continue
            children = parent + num_sequences if parent >= 0 else sequence
            child = first_child[children]
            while child >= 0 and nodes[child].token_id != node.token_id:
                child = next_sibling[child]
            if child < 0:
                child = count
                count += 1
                next_sibling[child] = first_child[children]
                first_child[children] = child
                nodes[child].token_id = node.token_id
                nodes[child].parent = parent - start[sequence] if parent >= 0 else -1
                nodes[child].depth = depth
                nodes[child].best_source = tree.source
            node.merged = child
            nodes[child].is_required |= node.is_required
            if is_guess and not node.ends_text:
                _add_guess(nodes[child], tree.source, float(node.confidence))
            else:
                node.confidence = 0.0
    start[sequence + 1 :] = count
    return start, nodes[:count].copy()


@numba.njit(cache=True)
def _add_guess(node, source, confidence):  # type: ignore[no-untyped-def]
    """Add a source that proposes the node."""
    if node.sources == 0:
        node.uncalibrated_probability = confidence
    else:
        either = 1.0 - (1.0 - node.uncalibrated_probability) * (1.0 - confidence)
        node.uncalibrated_probability = 0.5 * (max(node.uncalibrated_probability, confidence) + either)
    if node.sources == 0 or confidence > node.best_confidence:
        node.best_source, node.best_confidence = source, confidence
    node.sources |= 1 << source


@numba.njit(cache=True)
def _calibrate(start, nodes, sequences, curves, num_sources):  # type: ignore[no-untyped-def]
    """Steps 3 and 4 of `merge_trees`, in place."""
    for s in range(len(sequences)):
        tree = nodes[start[s] : start[s + 1]]
        together = np.zeros(len(tree) + 1)  # sum over each node's children; the root's first
        for m in range(len(tree)):
            together[tree[m].parent + 1] += tree[m].uncalibrated_probability
        for m in range(len(tree)):
            node = tree[m]
            limit, bound = 1.0, 1.0
            if node.parent >= 0:
                limit, bound = tree[node.parent].uncalibrated_probability, tree[node.parent].probability
            children = together[node.parent + 1]
            if children > limit:
                node.uncalibrated_probability = min(node.uncalibrated_probability * limit / children, limit)
            if node.sources:
                curve = curve_of_sources(node.sources, sequences[s].is_only, num_sources)
                node.curve = sequences[s].group * (2 * num_sources + 1) + curve
                node.probability = min(bound, max(0.0, interpolate(node.uncalibrated_probability, curves[node.curve])))
