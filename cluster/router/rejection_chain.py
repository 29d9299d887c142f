"""Chains of the draft model under `acceptance: rejection`, which carry the distributions they were drawn from.

The other sources do not draw: their tokens follow from the text, so the distribution q of each is a point mass. The
rule then accepts a token x with probability p(x), and else draws from p without x. That is the law of the coupled rule,
which draws from p and compares, so it verifies them: whole trees, with any dependence between draft and noise.
"""

from __future__ import annotations

import numpy as np

from actors.draft_tree import DraftTree


def parent_confidence(tree: DraftTree) -> np.ndarray:
    """Confidence of the node before each node of a chain, float32 [n]; 1 for the first."""
    shifted = np.ones(len(tree), np.float32)
    shifted[1:] = tree.confidence[:-1]
    return shifted


def is_chain(tree: DraftTree, vocab_size: int) -> bool:
    """Whether the tree is a valid chain and each token has a positive share in the draft distribution sent with it."""
    count = len(tree)
    if not count:
        return True
    probs = tree.probs
    if probs is None or probs.token_ids.dtype != np.int32 or probs.probs.dtype != np.float32:
        return False
    if probs.k < 1 or len(probs.token_ids) != count * probs.k or len(probs.probs) != count * probs.k:
        return False
    if not tree.is_valid(vocab_size) or not tree.is_chain:
        return False
    tokens = probs.token_ids.reshape(count, probs.k)
    shares = probs.probs.reshape(count, probs.k)
    if not (shares >= 0.0).all() or not (np.abs(shares.sum(axis=1) - 1.0) <= 1e-3).all():
        return False
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        return False
    return bool(((tokens == tree.token_ids[:, None]) & (shares > 0.0)).any(axis=1).all())
