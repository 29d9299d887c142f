"""A worker's recurrent state of one sequence, and the rows that are not part of it yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from actors.engine.block_pool import BlockPool
from actors.engine.sequence import Sequence
from actors.messages import SequenceStart


class MixerState(NamedTuple):
    """State of one mixer of one sequence."""

    conv: torch.Tensor  # [channels, kernel]: the last inputs of its convolution
    recurrent: torch.Tensor | None  # of the recurrence, of whatever shape; None: the mixer only convolves


@dataclass(slots=True)
class RecurrentStates:
    """States of all mixers after the first `num_tokens` tokens of a sequence, by mixer.

    The inputs of rows after these are kept, draft rows included. The next round begins with those of them that are
    accepted, so rejected rows never enter a state.
    """

    num_tokens: int = 0
    mixers: dict[int, MixerState] = field(default_factory=dict)  # empty: no token is in the state
    num_inputs: int = 0
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)  # [num_inputs, hidden] each


class RecurrentSequence(Sequence):
    """A sequence of a model with recurrent layers. No prefix is shared: a state is not kept at each border of blocks,
    so the pool of its blocks has no prefix cache."""

    def __init__(self, seq_id: int, begin: SequenceStart, pool: BlockPool) -> None:
        super().__init__(seq_id, begin, pool)
        self.states = RecurrentStates()

    def drop(self) -> None:
        super().drop()
        self.states = RecurrentStates()
