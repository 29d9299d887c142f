"""Sampling parameters of rows of logits, gathered from their sequences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numba
import numpy as np

from actors.messages import SamplingParams
from actors.sampling.noise import signed_seed


class SequenceSampling:
    """Sampling state of one sequence: its parameters and, if they need them, counts of its tokens.

    Takes O(new tokens) a round. Pass every committed token to `extend` once, prompt first.
    """

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Raises ValueError for a seed out of range."""
        self.params = params
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self.seed = signed_seed(params.seed)
        self.uses_history = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self.adjusts = self.uses_history or bool(params.logit_bias)
        is_hot = not params.is_greedy
        # The row parameters of `RowSampling` that are whole numbers, and the others.
        self.whole_numbers = (self.seed, is_hot, params.top_k)
        self.real_numbers = (
            params.temperature if is_hot else 1.0,
            params.top_p,
            math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        )
        self.penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        # One slot for each distinct token that has a bias or has occurred. The arrays grow by doubling.
        self._slots: dict[int, int] = {}
        self._tokens = np.empty(0, np.int64)
        self._seen = np.empty(0, np.bool_)
        self._counts = np.empty(0, np.int64)
        self._bias = np.empty(0, np.float32)
        for token, bias in params.logit_bias:
            slot = self._slot(token)  # may replace the arrays, so it comes first
            self._bias[slot] += np.float32(bias)

    def extend(self, token_ids: np.ndarray) -> None:
        """Count committed tokens, int [n], in order."""
        start = self.num_tokens
        self.num_tokens += len(token_ids)
        if not self.uses_history or len(token_ids) == 0:
            return
        num_prompt = min(max(self.num_prompt_tokens - start, 0), len(token_ids))
        for part, is_output in ((token_ids[:num_prompt], False), (token_ids[num_prompt:], True)):
            for token, count in Counter(part.tolist()).items():
                slot = self._slot(token)
                self._seen[slot] = True
                self._counts[slot] += count * is_output

    @property
    def counted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of each distinct token that has a bias or has occurred: its id, int64, whether it has occurred, bool, how
        often in the output, int64, and its bias, float32; views."""
        used = len(self._slots)
        return self._tokens[:used], self._seen[:used], self._counts[:used], self._bias[:used]

    def slots_of(self, token_ids: np.ndarray) -> list[int]:
        """Where tokens are in `counted`, -1 for those that are not."""
        return [self._slots.get(token, -1) for token in token_ids.tolist()]

    def _slot(self, token: int) -> int:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot >= len(self._tokens):
            room = max(16, 2 * slot)
            self._tokens = _grown(self._tokens, room)
            self._seen = _grown(self._seen, room)
            self._counts = _grown(self._counts, room)
            self._bias = _grown(self._bias, room)
        self._tokens[slot] = token
        return slot


class Paths(NamedTuple):
    """The draft tokens from the last committed token (not included) to the node of each of R rows (included): those of
    row r lie at [offsets[r], offsets[r + 1])."""

    tokens: np.ndarray  # int [P]
    offsets: np.ndarray  # int64 [R + 1]


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of R rows of logits. Row r will produce the token at index positions[r] of its sequence."""

    seeds: np.ndarray  # int64 [R], 64-bit seeds reinterpreted as signed
    positions: np.ndarray  # int64 [R]
    is_hot: np.ndarray  # bool [R]: noise is added; else temperature, top-k, top-p and min-p are skipped
    temperature: np.ndarray  # float32 [R], 1 where not hot
    top_k: np.ndarray  # int64 [R], 0: off
    top_p: np.ndarray  # float64 [R], 1: off
    min_log_ratio: np.ndarray  # float32 [R]: log(min_p), -inf: off
    # Logit adjustments, row after row: those of row r lie at [offsets[r], offsets[r + 1]), with distinct tokens.
    offsets: np.ndarray  # int64 [R + 1]
    tokens: np.ndarray  # int64 [N]
    divisor: np.ndarray  # float32 [N]
    subtrahend: np.ndarray  # float32 [N]
    bias: np.ndarray  # float32 [N]

    def __len__(self) -> int:
        return len(self.seeds)

    @cached_property
    def is_greedy(self) -> bool:
        """Whether every row is plain argmax of the raw logits."""
        return not self.is_hot.any() and len(self.tokens) == 0

    @cached_property
    def truncates(self) -> np.ndarray:
        """bool [R]: rows with top-k, top-p or min-p."""
        truncates: np.ndarray = self.is_hot & ((self.top_k > 0) | (self.top_p < 1.0) | (self.min_log_ratio > -np.inf))
        return truncates

    @cached_property
    def is_plain(self) -> np.ndarray:
        """bool [R]: rows whose token is the argmax of the raw logits."""
        plain: np.ndarray = ~self.is_hot & (self.offsets[1:] == self.offsets[:-1])
        return plain

    def take(self, rows: np.ndarray) -> Self:
        """The given rows, int [S], in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        lengths = (self.offsets[1:] - self.offsets[:-1])[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        entries = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return type(self)(
            seeds=self.seeds[rows],
            positions=self.positions[rows],
            is_hot=self.is_hot[rows],
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_log_ratio=self.min_log_ratio[rows],
            offsets=offsets,
            tokens=self.tokens[entries],
            divisor=self.divisor[entries],
            subtrahend=self.subtrahend[entries],
            bias=self.bias[entries],
        )


def rows_for(
    sequences: Sequence[SequenceSampling],
    row_sequence: np.ndarray,
    positions: np.ndarray,
    paths: Paths | Sequence[np.ndarray] | None = None,
) -> RowSampling:
    """Sampling parameters of R rows; row r belongs to sequences[row_sequence[r]].

    row_sequence: int [R]. positions: int [R], index of the token that the row produces. paths: that of each row, empty
    for root rows; None is allowed when no sequence uses history. Raises ValueError for paths that are missing or too
    few.
    """
    row_sequence = np.asarray(row_sequence, dtype=np.int64)
    offsets, tokens, divisor, subtrahend, bias = _adjustments_of(sequences, row_sequence, paths)
    whole = np.array([sequence.whole_numbers for sequence in sequences], np.int64).reshape(-1, 3)
    real = np.array([sequence.real_numbers for sequence in sequences], np.float64).reshape(-1, 3)
    seeds, is_hot, temperature, top_k, top_p, min_log_ratio = _parameters(whole, real, row_sequence)
    return RowSampling(
        seeds=seeds,
        positions=np.asarray(positions, dtype=np.int64),
        is_hot=is_hot,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_log_ratio=min_log_ratio,
        offsets=offsets,
        tokens=tokens,
        divisor=divisor,
        subtrahend=subtrahend,
        bias=bias,
    )


@numba.njit(cache=True, nogil=True)
def _parameters(whole, real, row_sequence):  # type: ignore[no-untyped-def]
    """The parameters of each row, in the order of `RowSampling`. whole: int64 [S, 3]; real: float64 [S, 3]."""
    count = len(row_sequence)
    seeds, is_hot, temperature = np.empty(count, np.int64), np.empty(count, np.bool_), np.empty(count, np.float32)
    top_k, top_p, min_log_ratio = np.empty(count, np.int64), np.empty(count, np.float64), np.empty(count, np.float32)
    for row, s in enumerate(row_sequence):
        seeds[row], is_hot[row], top_k[row] = whole[s, 0], whole[s, 1] != 0, whole[s, 2]
        temperature[row], top_p[row], min_log_ratio[row] = real[s, 0], real[s, 1], real[s, 2]
    return seeds, is_hot, temperature, top_k, top_p, min_log_ratio


_Adjustments = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
_NO_TOKENS, _NOTHING = np.empty(0, np.int64), np.empty(0, np.float32)


def _adjustments_of(
    sequences: Sequence[SequenceSampling], row_sequence: np.ndarray, paths: Paths | Sequence[np.ndarray] | None
) -> _Adjustments:
    """`RowSampling.offsets` and what follows it."""
    if paths is not None and not isinstance(paths, Paths):
        paths = _joined(paths)
    if paths is not None and len(paths.offsets) != len(row_sequence) + 1:
        raise ValueError(f"paths has {len(paths.offsets) - 1} entries; it must have one per row, {len(row_sequence)}")
    if not any(sequence.adjusts for sequence in sequences):
        return np.zeros(len(row_sequence) + 1, np.int64), _NO_TOKENS, _NOTHING, _NOTHING, _NOTHING
    if paths is None and any(sequence.uses_history for sequence in sequences):
        raise ValueError("paths is None; penalties need the draft tokens on the path to each row")
    if paths is None:
        paths = Paths(np.empty(0, np.int64), np.zeros(len(row_sequence) + 1, np.int64))
    counted = [sequence.counted for sequence in sequences]
    bases = np.zeros(len(sequences) + 1, np.int64)
    np.cumsum([len(part[0]) for part in counted], out=bases[1:])
    ids, seen, counts, bias = (np.concatenate(parts) for parts in zip(*counted, strict=True))
    path_tokens = paths.tokens.astype(np.int64)
    adjustments: _Adjustments = _adjust(
        bases,
        ids,
        seen,
        counts,
        bias,
        np.array([sequence.penalties for sequence in sequences], np.float64),
        np.array([sequence.uses_history for sequence in sequences]),
        row_sequence,
        path_tokens,
        _path_slots(sequences, row_sequence, Paths(path_tokens, paths.offsets)),
        paths.offsets,
    )
    return adjustments


def _joined(paths: Sequence[np.ndarray]) -> Paths:
    offsets = np.zeros(len(paths) + 1, np.int64)
    np.cumsum([len(path) for path in paths], out=offsets[1:])
    return Paths(np.concatenate([*paths, np.empty(0, np.int64)]), offsets)


def _path_slots(sequences: Sequence[SequenceSampling], row_sequence: np.ndarray, paths: Paths) -> np.ndarray:
    """int64 [P]: where each token of the paths is in `counted` of its sequence, -1 if it is not."""
    slots = np.full(len(paths.tokens), -1, np.int64)
    begin, end = 0, 0
    # Rows of one sequence follow one another, so it is asked once.
    for row in [*np.flatnonzero(np.diff(row_sequence)).tolist(), len(row_sequence) - 1]:
        begin, end = end, int(paths.offsets[row + 1])
        if end > begin:
            slots[begin:end] = sequences[row_sequence[row]].slots_of(paths.tokens[begin:end])
    return slots


@numba.njit(cache=True, nogil=True)
def _subtrahend(presence, frequency, count):  # type: ignore[no-untyped-def]
    return np.float32(presence * (1.0 if count > 0 else 0.0) + frequency * np.float64(count))


@numba.njit(cache=True, nogil=True)
def _adjust(  # type: ignore[no-untyped-def]
    bases, ids, seen, counts, bias, penalties, uses_history, row_sequence, path_tokens, path_slots, path_offsets
):
    """Offsets, tokens, divisors, subtrahends and biases of R rows: those of the row's sequence, changed by the tokens
    on the row's path, and then the tokens that the path alone has, ascending.

    bases: int64 [S + 1], where the tokens of each sequence lie in ids, seen, counts and bias. penalties: float64 [S,
    3], repetition, presence and frequency.
    """
    num_rows = len(row_sequence)
    offsets = np.zeros(num_rows + 1, np.int64)
    for row in range(num_rows):
        s, first, last = row_sequence[row], path_offsets[row], path_offsets[row + 1]
        size = bases[s + 1] - bases[s]
        if uses_history[s]:
            for at in range(first, last):
                is_new = path_slots[at] < 0
                for before in range(first, at):
                    is_new = is_new and path_tokens[before] != path_tokens[at]
                size += is_new
        offsets[row + 1] = offsets[row] + size
    divisors, subtrahends = np.ones(len(ids), np.float32), np.empty(len(ids), np.float32)
    for s in range(len(bases) - 1):
        repetition, presence, frequency = np.float32(penalties[s, 0]), penalties[s, 1], penalties[s, 2]
        for at in range(bases[s], bases[s + 1]):
            if seen[at]:
                divisors[at] = repetition
            subtrahends[at] = _subtrahend(presence, frequency, counts[at])
    tokens, divisor = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.float32)
    subtrahend, row_bias = np.empty(offsets[-1], np.float32), np.empty(offsets[-1], np.float32)
    for row in range(num_rows):
        s, begin = row_sequence[row], offsets[row]
        base, end = bases[s], begin + bases[s + 1] - bases[s]
        tokens[begin:end], divisor[begin:end] = ids[base : bases[s + 1]], divisors[base : bases[s + 1]]
        subtrahend[begin:end], row_bias[begin:end] = subtrahends[base : bases[s + 1]], bias[base : bases[s + 1]]
        if not uses_history[s]:
            continue
        repetition, presence, frequency = np.float32(penalties[s, 0]), penalties[s, 1], penalties[s, 2]
        for at in range(path_offsets[row], path_offsets[row + 1]):
            token, slot, count, is_first = path_tokens[at], path_slots[at], 0, True
            for other in range(path_offsets[row], path_offsets[row + 1]):
                if path_tokens[other] == token:
                    count += 1
                    is_first = is_first and other >= at
            if not is_first:
                continue
            if slot >= 0:
                place = begin + slot
                count += counts[base + slot]
            else:
                place = end
                end += 1
                while place > begin + bases[s + 1] - base and tokens[place - 1] > token:
                    tokens[place], subtrahend[place] = tokens[place - 1], subtrahend[place - 1]
                    place -= 1
                tokens[place] = token
                divisor[end - 1], row_bias[end - 1] = repetition, 0.0
            divisor[place] = repetition
            subtrahend[place] = _subtrahend(presence, frequency, count)
    return offsets, tokens, divisor, subtrahend, row_bias


def _grown(array: np.ndarray, room: int) -> np.ndarray:
    grown = np.zeros(room, array.dtype)
    grown[: len(array)] = array
    return grown
