"""Kernels that the online and the static automaton share."""

from __future__ import annotations

import numpy as np
from numba import njit

LINK, LENGTH = 0, 1
"""Columns of a clone's row in both automata."""


@njit(cache=True, nogil=True)
def length_of(clones, state):  # type: ignore[no-untyped-def]
    return state if state >= 0 else clones[~state, LENGTH]


@njit(cache=True, nogil=True)
def link_of(links, clones, state):  # type: ignore[no-untyped-def]
    return links[state] if state >= 0 else clones[~state, LINK]


@njit(cache=True, nogil=True)
def depths_of(parents, count, room):  # type: ignore[no-untyped-def]
    """Depth of each node of a tree, int32 [room + 1], node i at i + 1 and the root at 0; and nodes at each depth."""
    depths = np.zeros(room + 1, np.int32)
    at_depth = np.zeros(room + 2, np.int32)
    for node in range(count):
        depths[node + 1] = depths[parents[node] + 1] + 1
        at_depth[depths[node + 1]] += 1
    return depths, at_depth


@njit(cache=True, nogil=True)
def confidence_left(parents, confidence, count):  # type: ignore[no-untyped-def]
    """1 less the confidence of the root's children, at least 0."""
    left = np.float32(1)
    for node in range(count):
        if parents[node] < 0:
            left -= confidence[node]
    return max(left, np.float32(0))


@njit(cache=True, nogil=True)
def place_node(  # type: ignore[no-untyped-def]
    parent, token, score, known, width, token_ids, parents, confidence, depths, at_depth, count
):  # fmt: skip
    """The child of `parent` with this token among the first `known` nodes, or else the new node `count`. -1: there are
    `width` nodes at its depth already."""
    for node in range(known):
        if parents[node] == parent and token_ids[node] == token:
            return node
    depth = depths[parent + 1] + 1
    if at_depth[depth] >= width:
        return -1
    token_ids[count] = token
    parents[count] = parent
    confidence[count] = score if parent < 0 else min(score, confidence[parent])
    depths[count + 1] = depth
    at_depth[depth] += 1
    return count
