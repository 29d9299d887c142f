"""The draft trees of a round, one after the other in flat arrays: tree t has the nodes offsets[t] .. offsets[t + 1]."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numba import njit

from actors.draft_tree import DraftTree

_NO_NODES = np.empty(0, np.int32)
_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)


class Trees(NamedTuple):
    """Draft trees one after the other; a tree without nodes is a lone root."""

    tokens: np.ndarray  # int32 [N]
    parents: np.ndarray  # int32 [N], within the tree
    offsets: np.ndarray  # int64 [T + 1]: nodes of tree t are offsets[t] .. offsets[t + 1] - 1


def joined(tokens: Sequences[np.ndarray], parents: Sequences[np.ndarray]) -> Trees:
    """tokens, parents: int [n] of each tree."""
    offsets = offsets_of([*map(len, parents)])
    if offsets[-1] == 0:
        return Trees(_NO_NODES, _NO_NODES, offsets)
    return Trees(np.concatenate(tokens, dtype=np.int32), np.concatenate(parents, dtype=np.int32), offsets)


def offsets_of(counts: Sequences[int]) -> np.ndarray:
    """int64 [T + 1]: where parts of these sizes begin and end."""
    return np.array([*accumulate(counts, initial=0)])


@njit(cache=True, nogil=True)
def largest_tree(offsets: np.ndarray) -> int:
    """Nodes of it."""
    largest = 0
    for tree in range(len(offsets) - 1):
        largest = max(largest, offsets[tree + 1] - offsets[tree])
    return largest


def valid_trees(trees: Sequences[DraftTree], vocab_size: int) -> tuple[list[bool], Trees | None]:
    """`DraftTree.is_valid` of each, and all of them joined if all are valid."""
    tokens = [tree.token_ids for tree in trees]
    parents = [tree.parents for tree in trees]
    confidence = [tree.confidence for tree in trees]
    is_as_on_the_wire = (
        [*map(len, tokens)] == [*map(len, parents)] == [*map(len, confidence)]
        and _are_of(_INT32, tokens)
        and _are_of(_INT32, parents)
        and _are_of(_FLOAT32, confidence)
        and all(tree.required is None for tree in trees)
    )
    if not is_as_on_the_wire:
        return [tree.is_valid(vocab_size) for tree in trees], None
    together = joined(tokens, parents)
    if not len(together.tokens):
        return [True] * len(trees), together
    valid: list[bool] = _valid(*together, np.concatenate(confidence), vocab_size).tolist()
    return valid, together if all(valid) else None


def _are_of(dtype: np.dtype, arrays: Sequences[np.ndarray]) -> bool:
    for array in arrays:  # noqa: SIM110  # three times as fast as `all`
        if array.dtype is not dtype:
            return False
    return True


@njit(cache=True, nogil=True)
def _valid(
    token_ids: np.ndarray,  # int32 [all nodes]
    parents: np.ndarray,  # int32
    offsets: np.ndarray,
    confidence: np.ndarray,  # float32
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
