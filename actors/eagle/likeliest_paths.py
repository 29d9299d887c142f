"""The likeliest paths through guesses that do not depend on one another."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, nogil=True)
def likeliest_paths(scores: np.ndarray, max_nodes: int, min_score: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The likeliest nodes of the tree in which every guess for one position follows every guess for the one before.

    scores: float64 [positions, k], log-probabilities, likeliest first. max_nodes: most nodes. min_score: of nodes
    that have children. Returns, likeliest first, each node's place in `scores`, int64 [n, 2]; its parent, int32 [n],
    -1: the root; and its score, the sum along its path, float64 [n]. A parallel draft model has the same trees
    (`GrowingTree`), which grow bit by bit; these are made in the time between two rounds.
    """
    positions, width = scores.shape
    places = np.empty((max_nodes, 2), np.int64)
    parents = np.empty(max_nodes, np.int32)
    sums = np.empty(max_nodes, np.float64)
    # Nodes that may be next: of each node that was taken, its first child and its next sibling.
    open_places = np.empty((max_nodes + 1, 2), np.int64)
    open_parents = np.empty(max_nodes + 1, np.int32)
    open_sums = np.empty(max_nodes + 1, np.float64)
    num_open, count = 0, 0
    if max_nodes > 0 and positions > 0 and width > 0:
        open_places[0] = 0
        open_parents[0], open_sums[0], num_open = -1, scores[0, 0], 1
    while num_open > 0 and count < max_nodes:
        best = 0
        for place in range(1, num_open):
            if open_sums[place] > open_sums[best]:
                best = place
        depth, rank = open_places[best, 0], open_places[best, 1]
        parent, total = open_parents[best], open_sums[best]
        if total == -np.inf:
            break
        places[count, 0], places[count, 1] = depth, rank
        parents[count], sums[count] = parent, total
        # The sibling replaces the node, and the child is added.
        if rank + 1 < width:
            open_places[best, 1] = rank + 1
            open_sums[best] = (sums[parent] if parent >= 0 else 0.0) + scores[depth, rank + 1]
        else:
            num_open -= 1
            open_places[best] = open_places[num_open]
            open_parents[best], open_sums[best] = open_parents[num_open], open_sums[num_open]
        if depth + 1 < positions and total >= min_score:
            open_places[num_open, 0], open_places[num_open, 1] = depth + 1, 0
            open_parents[num_open], open_sums[num_open] = count, total + scores[depth + 1, 0]
            num_open += 1
        count += 1
    return places[:count], parents[:count], sums[:count]
