"""Which rows of a round the recurrent mixers compute together, and from which states.

A draft is a chain. Its rows follow the sequence's state, but whether they belong to it is known after the round alone.
So a run that ends with draft rows changes no state: the inputs of its rows are kept, and later runs begin with the
accepted ones. When many are kept, the accepted rows and the round's known tokens form one run that advances the state,
and the draft rows form a second run. Runs that move a state on end at borders of blocks whose states are cached.

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
from actors.engine.recurrent.states import MixerState, RecurrentSequence, RecurrentStates, StatesAt
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
_LAST = 1 << 30  # order of runs that change no state


@dataclass(slots=True)
class _Rows:
    """Rows of one sequence in a run."""

    states: RecurrentStates
    inputs: np.ndarray  # int64: places among the inputs of the forward, in order
    rows: np.ndarray  # int64: packed rows that the last of them are
    border: StatesAt | None = None  # filled with the states after these rows


class MixerRun:
    """One call of each mixer: S sequences of L rows each, the shorter ones with padding at their ends.

    A mixer is causal, so rows at the end change nothing before them. They would change the state: sequences whose state
    moves on have equal lengths.
    """

    def __init__(
        self, members: list[_Rows], has_state: bool, moves_on: bool, device: torch.device, *, least_rows: int
    ) -> None:
        self.states = [member.states for member in members]
        self._borders = [member.border for member in members]
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
        convs = [state.conv for state in own if state.conv is not None]
        if convs:
            conv = layer.conv_states[0] = torch.stack(convs)
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
        for place, (states, border) in enumerate(zip(self.states, self._borders, strict=True)):
            # Copies: a view would keep the states of all sequences of this run as long as its own.
            states.mixers[mixer] = MixerState(
                None if convs is None else convs[place].clone(), None if recurrent is None else recurrent[place].clone()
            )
            if border is not None:
                border.mixers[mixer] = states.mixers[mixer]


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
        self._passed: list[tuple[RecurrentStates, StatesAt]] = []  # borders, ascending for each sequence
        # By place in the order of a sequence's runs, whether there is a state, whether it moves on, and the length
        # where all have one
        self._groups: dict[tuple[int, bool, bool, int], list[_Rows]] = {}
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
        for (_, has_state, moves_on, _), members in sorted(self._groups.items(), key=lambda group: group[0][0]):
            self.runs.append(MixerRun(members, has_state, moves_on, device, least_rows=limits.least_rows))
        self._num_kept = [len(rows) for rows in kept]
        self._kept = torch.from_numpy(np.concatenate(kept)).to(device)

    def _plan(
        self, states: RecurrentStates, replayed: np.ndarray, rows: np.ndarray, num_known: int, begin: int
    ) -> np.ndarray:
        """Add a sequence's rows to the runs; int64, the inputs that are kept of them."""
        inputs, first = np.concatenate([replayed, rows]), states.num_tokens
        ends = self._ends(states, begin + num_known, may_stay=len(rows) > num_known or self._limits.least_rows > 1)
        place, has_state = 0, bool(states.mixers)
        for order, end in enumerate(ends):
            border = StatesAt(end) if states.is_border(end) else None
            own = inputs[place : end - first]
            self._add(
                (order, has_state, True, len(own)), _Rows(states, own, own[max(0, len(replayed) - place) :], border)
            )
            if border is not None:
                self._passed.append((states, border))
            place, has_state = end - first, True
        left = inputs[place:]
        if len(left):
            own_rows = left[max(0, len(replayed) - place) :]
            self._add((_LAST, has_state, False, 0), _Rows(states, left, own_rows))
        self._after.append((states, ends[-1] if ends else first, len(left)))
        return left

    def _ends(self, states: RecurrentStates, end: int, *, may_stay: bool) -> list[int]:
        """Tokens after which the runs end that move a sequence's state on. end: known tokens; may_stay: a run before it
        need not move the state."""
        place = states.num_tokens
        ends: list[int] = []
        most_left = self._limits.most_replayed if may_stay else 0
        if end - place <= most_left:
            return []
        for border in states.borders(place, end):
            if border - place >= self._limits.least_rows or not (ends or states.mixers):
                ends.append(border)
                place = border
        return [*ends, end] if end - place > most_left else ends

    def _add(self, group: tuple[int, bool, bool, int], rows: _Rows) -> None:
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
        for states, border in self._passed:
            states.pass_border(border)
