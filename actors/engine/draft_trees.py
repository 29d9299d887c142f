"""The draft trees of a round, one after the other in flat arrays: tree t has the nodes offsets[t] .. offsets[t + 1]."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from itertools import accumulate

import numpy as np
from numba import njit

from actors.draft_tree import DraftTree

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


def offsets_of(counts: Sequences[int]) -> np.ndarray:
    """int64 [T + 1]: where parts of these sizes begin and end."""
    return np.array([*accumulate(counts, initial=0)])


def valid_trees(trees: Sequences[DraftTree], vocab_size: int) -> list[bool]:
    """`DraftTree.is_valid` of each."""
    if not all(map(_is_as_on_the_wire, trees)):
        return [tree.is_valid(vocab_size) for tree in trees]
    counts = [len(tree.token_ids) for tree in trees]
    if not any(counts):
        return [True] * len(trees)
    valid: list[bool] = _valid(
        np.concatenate([tree.token_ids for tree in trees]),
        np.concatenate([tree.parents for tree in trees]),
        np.concatenate([tree.confidence for tree in trees]),
        offsets_of(counts),
        vocab_size,
    ).tolist()
    return valid


def _is_as_on_the_wire(tree: DraftTree) -> bool:
    """Whether the tree has arrays of one length and of the usual types."""
    token_ids, parents, confidence = tree.token_ids, tree.parents, tree.confidence
    return (
        len(token_ids) == len(parents) == len(confidence)
        and token_ids.dtype is _INT32
        and parents.dtype is _INT32
        and confidence.dtype is _FLOAT32
        and tree.required is None
    )


@njit(cache=True, nogil=True)
def _valid(
    token_ids: np.ndarray,  # int32 [all nodes]
    parents: np.ndarray,  # int32
    confidence: np.ndarray,  # float32
    offsets: np.ndarray,
    vocab_size: int,
) -> np.ndarray:
    """bool [T]."""
    valid = np.ones(len(offsets) - 1, np.bool_)
    for tree in range(len(valid)):
        first, end = offsets[tree], offsets[tree + 1]
        edges = np.empty(end - first, np.int64)
        for index in range(first, end):
            token, parent = np.int64(token_ids[index]), np.int64(parents[index])
            if (
                not 0 <= token < vocab_size
                or not -1 <= parent < index - first
                or not 0.0 <= confidence[index] <= 1.0  # also refuses NaN
            ):
                valid[tree] = False
                break
            edges[index - first] = parent * vocab_size + token
        if valid[tree]:
            edges.sort()
            for index in range(1, len(edges)):
                if edges[index] == edges[index - 1]:
                    valid[tree] = False
    return valid


@njit(cache=True, nogil=True)
def logit_places(parents, offsets, lengths):  # type: ignore[no-untyped-def]
    """The tree of each row of logits, int64 [T + nodes], and the index of the token that it produces, likewise.

    A tree has a row for its root and one for each node. parents: int32 [nodes]. lengths: int64 [T], index of the token
    after the root.
    """
    trees = np.empty(len(parents) + len(lengths), np.int64)
    positions = np.empty(len(trees), np.int64)
    for tree in range(len(lengths)):
        first = offsets[tree]
        root = first + tree
        trees[root], positions[root] = tree, lengths[tree]
        for index in range(first, offsets[tree + 1]):
            row = root + 1 + index - first
            trees[row], positions[row] = tree, positions[root + 1 + parents[index]] + 1
    return trees, positions


@njit(cache=True, nogil=True)
def tree_paths(tokens, parents, offsets):  # type: ignore[no-untyped-def]
    """The tokens from the root to each row of logits, one path after the other, int32, and where each path begins and
    ends, int64 [T + nodes + 1]. Rows as in `logit_places`; the path of a root is empty."""
    num_trees = len(offsets) - 1
    ends = np.zeros(len(parents) + num_trees + 1, np.int64)
    for tree in range(num_trees):
        root = offsets[tree] + tree
        ends[root + 1] = ends[root]
        for index in range(offsets[tree + 1] - offsets[tree]):
            row, parent = root + 1 + index, root + 1 + parents[offsets[tree] + index]
            ends[row + 1] = ends[row] + ends[parent + 1] - ends[parent] + 1
    paths = np.empty(ends[-1], np.int32)
    for tree in range(num_trees):
        root = offsets[tree] + tree
        for index in range(offsets[tree + 1] - offsets[tree]):
            row, parent = root + 1 + index, root + 1 + parents[offsets[tree] + index]
            paths[ends[row] : ends[row + 1] - 1] = paths[ends[parent] : ends[parent + 1]]
            paths[ends[row + 1] - 1] = tokens[offsets[tree] + index]
    return paths, ends
