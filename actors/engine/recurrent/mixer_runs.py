"""Which rows of a round the recurrent mixers compute together, and from which states.

A draft is a chain. Its rows follow the sequence's state, but whether they belong to it is known after the round alone.
So a run that ends with draft rows changes no state: the inputs of its rows are kept, and later runs begin with the
accepted ones. When many are kept, the accepted ones and the round's known tokens are a run of their own that moves the
state on, and the draft rows a second one.

    state after 40 tokens, 3 kept inputs of which 2 are accepted, 1 known token, 3 draft rows:

    kept 40 41 | known 42 | drafts 43 44 45      one run, from the state after 40, which stays; 6 inputs are kept
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from transformers.cache_utils import LinearAttentionLayer

from actors.engine.batch import PackedBatch
from actors.engine.recurrent.states import MixerState, RecurrentSequence, RecurrentStates
from actors.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits of runs, which depend on how the model's mixers compute."""

    # Rows before the draft rows that a run may compute without moving the state on. Measured on one core with layers
    # of width 1024, one text, chains of 8 with 4 accepted, ms of processor time a round at 0 and 16: Qwen3-Next 118 and
    # 90, Bamba 75 and 70, LFM2 40 and 37. Each run reads the weights of a mixer once.
    most_replayed: int = 16
    # 2: one row after a state is not computed as several are, so a run never has one alone: a known row without drafts
    # is kept like a draft row, too.
    least_rows: int = 1


_DEFAULT_LIMITS = RunLimits()


@dataclass(slots=True)
class _Rows:
    """Rows of one sequence in a run."""

    states: RecurrentStates
    inputs: np.ndarray  # int64: places among the inputs of the forward, in order
    rows: np.ndarray  # int64: packed rows that the last of them are


class MixerRun:
    """One call of each mixer: S sequences of L rows each, the shorter ones with padding at their ends.

    A mixer is causal, so rows at the end change nothing before them. They would change the state: sequences whose state
    moves on have equal lengths.
    """

    def __init__(
        self, members: list[_Rows], has_state: bool, moves_on: bool, device: torch.device, *, least_rows: int
    ) -> None:
        self.states = [member.states for member in members]
        self.has_state = has_state
        self.moves_on = moves_on
        longest = max(len(member.inputs) for member in members)
        self.num_rows = longest if moves_on else max(longest, least_rows)
        inputs = np.zeros((len(members), self.num_rows), np.int64)
        outputs = []
        for place, member in enumerate(members):
            count = len(member.inputs)
            inputs[place, :count] = member.inputs
            first = place * self.num_rows + count
            outputs.append(np.arange(first - len(member.rows), first))
        self.inputs = torch.from_numpy(inputs.reshape(-1)).to(device)  # [S * L]
        self.outputs = torch.from_numpy(np.concatenate(outputs)).to(device)  # places in [S * L]
        self.rows = torch.from_numpy(np.concatenate([member.rows for member in members])).to(device)

    def load(self, mixer: int) -> LinearAttentionLayer:
        """The states of a mixer, in a layer of transformers' cache; the caller may change them."""
        layer = LinearAttentionLayer()
        if not self.has_state:
            return layer
        own = [states.mixers[mixer] for states in self.states]
        conv = torch.stack([state.conv for state in own])
        layer.conv_states[0] = conv
        layer.conv_kernel_size[0] = conv.shape[-1]
        layer.is_conv_states_initialized[0] = layer.has_previous_state[0] = True
        layer.device, layer.dtype = conv.device, conv.dtype
        recurrent = [state.recurrent for state in own if state.recurrent is not None]
        if recurrent:
            layer.recurrent_states[0] = torch.stack(recurrent)
            layer.is_recurrent_states_initialized[0] = True
        return layer

    def store(self, mixer: int, layer: LinearAttentionLayer) -> None:
        """Move the states of a mixer on to those of the layer."""
        convs, recurrent = layer.conv_states[0], layer.recurrent_states[0]
        assert convs is not None
        for place, states in enumerate(self.states):
            # Copies: a view would keep the states of all sequences of this run as long as its own.
            own = None if recurrent is None else recurrent[place].clone()
            states.mixers[mixer] = MixerState(convs[place].clone(), own)


class MixerRuns:
    """The runs of one forward, in order, and what is kept of it.

    The inputs of a mixer's forward are those of the packed rows, then the kept ones of all sequences.
    """

    def __init__(
        self,
        batch: PackedBatch,
        sequences: Sequences[Sequence],
        num_rows: int,
        device: torch.device,
        limits: RunLimits = _DEFAULT_LIMITS,
    ) -> None:
        """num_rows: packed rows with padding. Raises ValueError for a sequence whose kept inputs do not reach its first
        row."""
        self._limits = limits
        self.runs: list[MixerRun] = []
        self._replaying: list[RecurrentStates] = []
        self._after: list[tuple[RecurrentStates, int, int]] = []  # tokens in the state, inputs kept
        # By whether there is a state, whether it moves on, and the length where all have one
        self._groups: dict[tuple[bool, bool, int], list[_Rows]] = {}
        self._states: list[RecurrentStates] = []
        kept: list[np.ndarray] = []
        first_kept = num_rows
        bounds = pairwise(batch.first_rows.tolist())
        for sequence, begin, (first, end) in zip(sequences, batch.begins.tolist(), bounds, strict=True):
            assert isinstance(sequence, RecurrentSequence)
            states = sequence.states
            self._states.append(states)
            num_replayed = begin - states.num_tokens
            if not 0 <= num_replayed <= states.num_inputs:
                raise ValueError(
                    f"sequence {sequence.seq_id} begins at token {begin}; its recurrent state is after "
                    f"{states.num_tokens} and {states.num_inputs} rows are kept"
                )
            if states.num_inputs:
                self._replaying.append(states)
            replayed = np.arange(first_kept, first_kept + num_replayed)
            first_kept += states.num_inputs
            num_known = min(end - first, sequence.length - begin)
            kept.append(self._plan(states, replayed, np.arange(first, end), num_known, begin))
        for (has_state, moves_on, _), members in self._groups.items():
            self.runs.append(MixerRun(members, has_state, moves_on, device, least_rows=limits.least_rows))
        self.runs.sort(key=lambda run: not run.moves_on)  # draft rows may follow a state that has moved on
        self._num_kept = [len(rows) for rows in kept]
        self._kept = torch.from_numpy(np.concatenate(kept)).to(device)

    def _plan(
        self, states: RecurrentStates, replayed: np.ndarray, rows: np.ndarray, num_known: int, begin: int
    ) -> np.ndarray:
        """Add a sequence's rows to the runs; int64, the inputs that are kept of them."""
        known, drafts = rows[:num_known], rows[num_known:]
        has_state = bool(states.mixers)
        may_stay = len(drafts) > 0 or self._limits.least_rows > 1
        if may_stay and len(replayed) + num_known <= self._limits.most_replayed:
            inputs = np.concatenate([replayed, rows])
            self._add((has_state, False, 0), _Rows(states, inputs, rows))
            self._after.append((states, states.num_tokens, len(inputs)))
            return inputs
        inputs = np.concatenate([replayed, known])
        self._add((has_state, True, len(inputs)), _Rows(states, inputs, known))
        if len(drafts):
            self._add((True, False, 0), _Rows(states, drafts, drafts))
        self._after.append((states, begin + num_known, len(drafts)))
        return drafts

    def _add(self, group: tuple[bool, bool, int], rows: _Rows) -> None:
        self._groups.setdefault(group, []).append(rows)

    def inputs(self, mixer: int, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden], of the packed rows -> [n, hidden], with the kept ones."""
        if not self._replaying:
            return hidden
        return torch.cat([hidden, *(states.inputs[mixer] for states in self._replaying)])

    def keep(self, mixer: int, inputs: torch.Tensor) -> None:
        """Keep what later forwards may begin with. inputs: as `inputs` returns them."""
        kept = inputs.index_select(0, self._kept).split(self._num_kept)
        for states, own in zip(self._states, kept, strict=True):
            # Copies, as in `MixerRun.store`
            states.inputs[mixer] = own.clone() if len(self._states) > 1 else own

    def finish(self) -> None:
        """To be called when all mixers have computed."""
        for states, num_tokens, num_inputs in self._after:
            states.num_tokens, states.num_inputs = num_tokens, num_inputs
