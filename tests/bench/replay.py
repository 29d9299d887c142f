"""What benchmarks of drafters share: timing, and what a target that writes a known text accepts."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from actors.draft_tree import DraftTree


def best_seconds(work: Callable[[], object], runs: int = 5) -> float:
    """CPU seconds of this thread in the best of several runs."""
    times = []
    for _ in range(runs):
        begin = time.thread_time()
        work()
        times.append(time.thread_time() - begin)
    return min(times)


def accepted_path(tree: DraftTree, truth: np.ndarray) -> list[int]:
    """Nodes from the root on that hold the next tokens of the text."""
    path: list[int] = []
    for token in truth:
        parent = path[-1] if path else -1
        child = np.flatnonzero((tree.parents == parent) & (tree.token_ids == token))
        if not len(child):
            break
        path.append(int(child[0]))
    return path
