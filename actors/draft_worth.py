"""What drafting on is worth, as the router tells draft workers and the target's head.

A forward of a draft model serves the nodes of all sequences that are still drafted for, and takes as long for few of
them as for many. So whether another one pays depends on all of them: it does if the tokens that their children will
bring, less what those cost as rows of the target, are more than the round would emit in the time of the forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def no_worth() -> np.ndarray:
    """Every forward pays: float32 [0]."""
    return np.empty(0, np.float32)


def pays(
    worth: np.ndarray, confidence: Sequence[float] | np.ndarray, weights: Sequence[float] | np.ndarray | float = 1.0
) -> bool:
    """Whether a forward after nodes of these path confidences, of all sequences, pays.

    worth: float32 [2k]: k confidences, ascending, and what part of a forward's price a node of that confidence brings.
    weights: how many such nodes each one stands for.
    """
    half = len(worth) // 2
    return half == 0 or bool((np.interp(confidence, worth[:half], worth[half : 2 * half]) * weights).sum() >= 1.0)


def scaled(worth: np.ndarray, factor: float) -> np.ndarray:
    """`worth` of nodes that bring `factor` times as many tokens: float32 [2k]."""
    half = len(worth) // 2
    return np.concatenate([worth[:half], worth[half:] * np.float32(factor)])
