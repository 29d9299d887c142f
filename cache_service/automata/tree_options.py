"""How drafts grow out of automata that know many texts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TOP_CONTINUATIONS = 8
"""Continuations of a state that count by frequency; a draft branches into no more."""

FALLBACKS = 8
"""Shorter suffixes that a draft falls back to; text has chains of 3-6."""

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """How a draft tree grows.

    The confidence of a node is its parent's, times the share of the parent's occurrences that went on with its token,
    times acceptance[min(length, m - 1)] for the length of the match, which grows with every node. The share is taken
    of prior / length occurrences more than there were: a short match that occurred once is little evidence.
    """

    acceptance: Float32Array  # float32 [m], m >= 1, in [0, 1]
    floor: float = 0.03  # nodes with less confidence are left out
    prior: float = 4.0
    width: int = TOP_CONTINUATIONS  # nodes at most at one depth, and children of one node
    min_match: int = 1  # shorter matches draft nothing, >= 1
    len_bias: int = 0  # taken off the length of every match
    min_continuation: int = 0  # a tree with fewer nodes also takes what followed shorter suffixes of the match
