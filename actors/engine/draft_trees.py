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


def valid_trees(trees: Sequences[DraftTree], vocab_size: int) -> tuple[list[bool], Trees | None]:
    """`DraftTree.is_valid` of each, and all of them joined if all are valid."""
    if not _are_as_on_the_wire(trees):
        return [tree.is_valid(vocab_size) for tree in trees], None
    offsets = offsets_of([len(tree.token_ids) for tree in trees])
    if not offsets[-1]:
        return [True] * len(trees), Trees(_NO_NODES, _NO_NODES, offsets)
    together = Trees(
        np.concatenate([tree.token_ids for tree in trees]), np.concatenate([tree.parents for tree in trees]), offsets
    )
    valid: list[bool] = _valid(*together, np.concatenate([tree.confidence for tree in trees]), vocab_size).tolist()
    return valid, together if all(valid) else None


def _are_as_on_the_wire(trees: Sequences[DraftTree]) -> bool:
    for tree in trees:
        tokens, parents, confidence = tree.token_ids, tree.parents, tree.confidence
        if tokens.dtype is not _INT32 or parents.dtype is not _INT32 or confidence.dtype is not _FLOAT32:
            return False
        if not len(tokens) == len(parents) == len(confidence) or tree.required is not None:
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
        for index in range(first, end):
            token, parent = np.int64(token_ids[index]), np.int64(parents[index])
            if (
                not 0 <= token < vocab_size
                or not -1 <= parent < index - first
                or not 0.0 <= confidence[index] <= 1.0  # also refuses NaN
            ):
                valid[tree] = False
                break
        if valid[tree]:
            valid[tree] = _has_distinct_siblings(token_ids[first:end], parents[first:end], vocab_size)
    return valid


_FEW_NODES = 16  # whose comparison with each other takes less time than sorting them


@njit(cache=True, nogil=True)
def _has_distinct_siblings(tokens: np.ndarray, parents: np.ndarray, vocab_size: int) -> bool:
    count = len(tokens)
    if count <= _FEW_NODES:
        for index in range(count):
            for other in range(index):
                if tokens[index] == tokens[other] and parents[index] == parents[other]:
                    return False
        return True
    edges = np.sort(parents.astype(np.int64) * vocab_size + tokens)
    is_distinct: bool = (edges[1:] != edges[:-1]).all()
    return is_distinct


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
