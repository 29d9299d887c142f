"""What a round asks of the logits, and what it gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from actors.messages import Successors
from actors.sampling.rows import RowSampling


class Trees(NamedTuple):
    """The draft trees of the emitting sequences, one after the other; a tree without nodes is a lone root."""

    tokens: np.ndarray  # int32 [N]
    parents: np.ndarray  # int32 [N], within the tree
    offsets: np.ndarray  # int64 [T + 1]: nodes of tree t are offsets[t] .. offsets[t + 1] - 1


@dataclass(frozen=True, slots=True)
class Draws:
    """Tokens to draw after the root and each node of T trees of together N nodes."""

    trees: Trees
    sampling: RowSampling  # of T + N rows: the root and then the nodes of each tree
    num_successors: int  # most probable tokens to report of each row
    keeps_logits: bool


@dataclass(frozen=True, slots=True)
class Emitted:
    """What the target says after each of T trees."""

    next_tokens: list[int]
    paths: list[np.ndarray]  # accepted nodes, int32
    successors: Successors | None  # None: not asked for
    logits: torch.Tensor | None  # [T + N or more, vocab]; None: not to be kept
