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


def pays(worth: np.ndarray, confidence: Sequence[float] | np.ndarray) -> bool:
    """Whether a forward after nodes of these path confidences, of all sequences, pays.

    worth: float32 [2k]: k confidences, ascending, and what part of a forward's price a node of that confidence brings.
    """
    return not len(worth) or bool(parts(worth, confidence).sum() >= 1.0)


def parts(worth: np.ndarray, confidence: Sequence[float] | np.ndarray) -> np.ndarray:
    """What part of a forward's price nodes of these path confidences bring, float64 [n]. worth: not empty, as in
    `pays`."""
    half = len(worth) // 2
    return np.interp(confidence, worth[:half], worth[half : 2 * half])


def scaled(worth: np.ndarray, factor: float) -> np.ndarray:
    """`worth` of nodes that bring `factor` times as many tokens: float32 [2k]."""
    half = len(worth) // 2
    return np.concatenate([worth[:half], worth[half:] * np.float32(factor)])
