"""What a round draws from its logits, and the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from actors.messages import Successors
from actors.sampling.row_masks import RowMasks


@dataclass(frozen=True, slots=True)
class Draws:
    """Tokens are drawn after the root and each node of the trees of sequences that emit."""

    num_successors: int  # most probable tokens to report of each row
    keeps_logits: bool  # as tokens are drawn from them: within the grammar
    # Masks of these rows, called once when the rows are launched; it may block. None, or gives None: no grammar
    masks: Callable[[], RowMasks | None] | None = None
    keeps_raw: bool = False  # keeps logits as the model gives them


@dataclass(slots=True)
class Emitted:
    """The outcome of T trees that have N nodes together."""

    nodes: np.ndarray  # int32: accepted nodes of all trees
    ends: np.ndarray  # int64 [T + 1]: offsets of each tree's accepted nodes
    next_tokens: np.ndarray  # int64 [T]
    successors: Successors | None  # None: not asked for
    logits: torch.Tensor | None  # [T + N or more, vocab]; None: not kept
    raw_logits: torch.Tensor | None = None  # the same without a grammar
