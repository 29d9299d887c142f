"""What a round asks of the logits, and what it gets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from actors.engine.draft_trees import Trees
from actors.messages import Successors
from actors.sampling.rows import RowSampling


@dataclass(slots=True)
class Draws:
    """Tokens to draw after the root and each node of T trees of together N nodes."""

    trees: Trees
    sampling: RowSampling  # of T + N rows: the root and then the nodes of each tree
    num_successors: int  # most probable tokens to report of each row
    keeps_logits: bool

    @property
    def num_trees(self) -> int:
        return len(self.trees.offsets) - 1


@dataclass(slots=True)
class Emitted:
    """What the target says after each of T trees."""

    next_tokens: list[int]
    paths: list[np.ndarray]  # accepted nodes, int32
    successors: Successors | None  # None: not asked for
    logits: torch.Tensor | None  # [T + N or more, vocab]; None: not to be kept
