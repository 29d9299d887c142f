"""A worker's recurrent state of one sequence, and the rows that are not part of it yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch

from actors.engine.block_pool import BlockPool
from actors.engine.sequence import Sequence
from actors.messages import SequenceStart


class MixerState(NamedTuple):
    """State of one mixer of one sequence."""

    conv: torch.Tensor | None  # [channels, kernel]: the last inputs of its convolution; None: it has none
    recurrent: torch.Tensor | None  # of the recurrence, of whatever shape; None: the mixer only convolves


@dataclass(slots=True)
class StatesAt:
    """States of all mixers after the first `num_tokens` tokens of a text, by mixer. They are never written to."""

    num_tokens: int = 0
    mixers: dict[int, MixerState] = field(default_factory=dict)  # empty: no token is in the state


@dataclass(slots=True)
class RecurrentStates(StatesAt):
    """States of a sequence.

    The inputs of rows after these are kept, draft rows included. The next round begins with those of them that are
    accepted, so rejected rows never enter a state.
    """

    num_inputs: int = 0
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)  # [num_inputs, hidden] each
    block_size: int = 0  # 0: states at borders of blocks are not kept
    wanted: tuple[int, ...] = ()  # borders whose states are to be cached as soon as they are known, ascending
    reached: list[StatesAt] = field(default_factory=list)  # at these, not cached yet
    last: StatesAt | None = None  # at the last border that the states have passed

    def borders(self, begin: int, end: int) -> list[int]:
        """Where rows begin .. end - 1 are cut, so that states at borders are known: after the last border that they
        reach, and after wanted ones."""
        if not self.block_size:
            return []
        borders = {end // self.block_size * self.block_size, *self.wanted}
        return sorted(border for border in borders if begin < border <= end)

    def is_border(self, num_tokens: int) -> bool:
        return self.block_size > 0 and num_tokens % self.block_size == 0

    def pass_border(self, states: StatesAt) -> None:
        self.last = states
        if states.num_tokens in self.wanted:
            self.reached.append(states)


class RecurrentSequence(Sequence):
    """A sequence of a model with recurrent layers.

    A new one can begin with cached blocks up to one with states attached. There are few of these, because states are as
    large as the keys and values of many tokens: at the last border of blocks in each prompt, where a prompt leaves one
    that came before, and where a sequence ends.
    """

    def __init__(self, seq_id: int, begin: SequenceStart, pool: BlockPool) -> None:
        super().__init__(seq_id, begin, pool)
        self.states = RecurrentStates(block_size=pool.block_size if pool.prefix_cache else 0)

    def reuse_prefix(self) -> None:
        known = self.length - 1
        blocks, hashes = self._pool.find_prefix(self.begin.namespace, self.tokens[:known])
        count, states = self._pool.deepest_states(blocks)
        self._pool.release(blocks[count:])
        self._begin_with(blocks[:count], hashes[:count])
        if states is not None:
            found = cast("StatesAt", states)
            self.states.num_tokens, self.states.mixers = found.num_tokens, dict(found.mixers)
        size = self.block_size
        self.states.wanted = tuple({len(blocks) * size, known // size * size} - {count * size})

    def publish(self) -> None:
        super().publish()
        self._cache(self.states.reached)
        self.states.reached = []

    def _cache(self, states: list[StatesAt]) -> None:
        for at in states:
            index = at.num_tokens // self.block_size
            if index < len(self._hashes):
                self._pool.attach_states(self._hashes[index], at)

    def free(self) -> None:
        self._cache([*self.states.reached, *filter(None, [self.states.last])])
        super().free()

    def drop(self) -> None:
        super().drop()
        self.states = RecurrentStates()
