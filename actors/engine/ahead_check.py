"""Whether a round sent ahead is one that a router sends. Compiled functions check no bounds."""

from __future__ import annotations

import numpy as np

from actors.draft_tree import DraftTree
from actors.engine.draft_trees import Trees, valid_trees
from actors.messages import VerifyAhead

_NO_CONFIDENCE = DraftTree.empty().confidence


def is_well_formed(ahead: VerifyAhead, vocab_size: int) -> bool:
    """Whether each sequence comes once, and its tree is valid, without draft distributions, and has no node that is
    more probable than its parent, so that none is taken without it."""
    if len({item.seq_id for item in ahead.items}) < len(ahead.items):
        return False
    trees = [item.tree for item in ahead.items if item.tree is not None]
    together = valid_trees(trees, vocab_size)[1]
    if together is None or any(tree.probs is not None for tree in trees):
        return False
    return not _rises(together, np.concatenate([_NO_CONFIDENCE, *[tree.confidence for tree in trees]]))


def _rises(trees: Trees, confidence: np.ndarray) -> bool:
    """Whether a node is more probable than its parent. confidence: float32 [nodes]."""
    first = trees.offsets[:-1].repeat(np.diff(trees.offsets))  # node of its tree, for each node
    has_parent = trees.parents >= 0
    return bool((confidence[has_parent] > confidence[(first + trees.parents)[has_parent]]).any())
