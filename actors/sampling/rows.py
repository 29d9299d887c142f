"""Sampling parameters of rows of logits, gathered from their sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

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
            distinct, occurrences = np.unique(part, return_counts=True)
            for token, count in zip(distinct.tolist(), occurrences.tolist(), strict=True):
                slot = self._slot(token)
                self._seen[slot] = True
                self._counts[slot] += count * is_output

    def adjustments(self, path: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Adjustments of the logits after the committed tokens and those of `path` (int [n]).

        Returns per distinct token: ids int64, repetition divisor, subtrahend and bias, each float32. A logit l becomes
        (l / divisor if l > 0 else l * divisor) - subtrahend + bias.
        """
        used = len(self._slots)
        tokens, seen, counts, bias = (part[:used] for part in (self._tokens, self._seen, self._counts, self._bias))
        if self.uses_history and path is not None and len(path):
            distinct, occurrences = np.unique(path, return_counts=True)
            slots = np.array([self._slots.get(token, -1) for token in distinct.tolist()])
            known, new = slots >= 0, slots < 0
            tokens = np.concatenate([tokens, distinct[new]])
            seen = np.concatenate([seen, np.ones(new.sum(), np.bool_)])
            counts = np.concatenate([counts, occurrences[new]])
            bias = np.concatenate([bias, np.zeros(new.sum(), np.float32)])
            seen[slots[known]] = True
            counts[slots[known]] += occurrences[known]
        params = self.params
        divisor = np.where(seen, np.float32(params.repetition_penalty), np.float32(1.0))
        subtrahend = params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        return tokens, divisor, subtrahend.astype(np.float32), bias

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
    paths: Sequence[np.ndarray] | None = None,
) -> RowSampling:
    """Sampling parameters of R rows; row r belongs to sequences[row_sequence[r]].

    row_sequence: int [R]. positions: int [R], index of the token that the row produces. paths[r]: int, the draft tokens
    from the last committed token (not included) to the row's node (included), empty for root rows; None for all of them
    is allowed when no sequence uses history. Raises ValueError for paths that are missing or too few.
    """
    if paths is not None and len(paths) != len(row_sequence):
        raise ValueError(f"paths has {len(paths)} entries; it must have one per row, {len(row_sequence)}")
    offsets, (tokens, divisor, subtrahend, bias) = _adjustments_of(sequences, row_sequence, paths)
    whole = np.array([sequence.whole_numbers for sequence in sequences], np.int64).reshape(-1, 3)
    real = np.array([sequence.real_numbers for sequence in sequences], np.float64).reshape(-1, 3)
    seeds, is_hot, temperature, top_k, top_p, min_log_ratio = _parameters(
        whole, real, np.asarray(row_sequence, dtype=np.int64)
    )
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


_Adjustments = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
_NO_ADJUSTMENTS: _Adjustments = (
    np.empty(0, np.int64),
    np.empty(0, np.float32),
    np.empty(0, np.float32),
    np.empty(0, np.float32),
)


def _adjustments_of(
    sequences: Sequence[SequenceSampling], row_sequence: np.ndarray, paths: Sequence[np.ndarray] | None
) -> tuple[np.ndarray, _Adjustments]:
    if not any(sequence.adjusts for sequence in sequences):
        return np.zeros(len(row_sequence) + 1, np.int64), _NO_ADJUSTMENTS
    if paths is None and any(sequence.uses_history for sequence in sequences):
        raise ValueError("paths is None; penalties need the draft tokens on the path to each row")
    lengths = np.zeros(len(row_sequence), np.int64)
    parts = [_NO_ADJUSTMENTS]
    for row, index in enumerate(row_sequence.tolist()):
        if sequences[index].adjusts:
            part = sequences[index].adjustments(None if paths is None else paths[row])
            lengths[row] = len(part[0])
            parts.append(part)
    tokens, divisor, subtrahend, bias = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return np.concatenate([[0], np.cumsum(lengths)]), (tokens, divisor, subtrahend, bias)


def _grown(array: np.ndarray, room: int) -> np.ndarray:
    grown = np.zeros(room, array.dtype)
    grown[: len(array)] = array
    return grown
