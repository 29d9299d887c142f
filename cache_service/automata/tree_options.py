"""Options of the drafts that automata make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TOP_CONTINUATIONS = 8
"""Continuations of a state kept in order of frequency; a node has at most as many children."""

FALLBACKS = 8
"""Most shorter suffixes that a draft falls back to; text has chains of 3-6."""

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """How a draft tree grows.

    The confidence of a node is its parent's, times the share of the parent's occurrences that continued with its token,
    times acceptance[min(length, m - 1)], where the length of the match grows with every node. The share's denominator
    is increased by prior / length, because a short match that occurred once is little evidence.
    """

    acceptance: Float32Array  # float32 [m], m >= 1, in [0, 1]
    floor: float = 0.03  # nodes with less confidence are left out
    prior: float = 4.0
    width: int = TOP_CONTINUATIONS  # most nodes at one depth
    min_match: int = 1  # shorter matches draft nothing, >= 1
    len_bias: int = 0  # subtracted from the length of every match
    min_continuation: int = 0  # a tree with fewer nodes also gets continuations of shorter suffixes


@dataclass(frozen=True, slots=True)
class BranchOptions:
    """How `SuffixAutomaton.extend_and_draft` drafts."""

    acceptance: Float32Array  # [m >= 1], in [0, 1]; [min(length, m - 1)]: chance that the token after a match is right
    floor: float  # nodes with less confidence are left out
    len_threshold: int = 1  # shorter matches draft nothing, >= 1
    len_bias: int = 0  # subtracted from the length of every match
    alpha: float | None = None  # at most 1 + floor(alpha * length) nodes; None: no such limit
    branches: int = 3  # branches from the root, 1 to MAX_BRANCHES
    by_frequency: bool = False  # order the match's continuations by frequency; confidence is proportional to it
