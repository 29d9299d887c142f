"""Sampling parameters of rows of logits, gathered from their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numba import njit

from actors.records import addresses_of
from actors.sampling.sequence_sampling import ADJUSTMENT, SequenceSampling, find_token, sampling_at, subtrahend

ROW = np.dtype(
    [
        ("seed", "<i8"),  # 64-bit, reinterpreted as signed
        ("position", "<i8"),  # index of the token that the row produces
        ("top_k", "<i8"),  # 0: off
        ("top_p", "<f8"),  # 1: off
        ("temperature", "<f4"),  # 1 without noise
        ("min_log_ratio", "<f4"),  # log(min_p), -inf: off
        ("flags", "<i4"),
        ("slot", "<i4"),  # among the rows with adjustments, -1 for others; set when rows are packed
        # Adjustments of the row's sequence, and those of the tokens on the row's path, which take their place
        ("begin", "<i4"),
        ("end", "<i4"),
        ("own_begin", "<i4"),
        ("own_end", "<i4"),
    ]
)
IS_HOT, TRUNCATES = 1, 2  # flags: noise is added, else temperature and truncation are off; has top-k, top-p or min-p


class Paths(NamedTuple):
    """The draft tokens from the last committed token (not included) to the node of each of R rows (included): those of
    row r lie at [offsets[r], offsets[r + 1])."""

    tokens: np.ndarray  # int [P]
    offsets: np.ndarray  # int64 [R + 1]


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of R rows of logits. Rows of one sequence share its adjustments."""

    records: np.ndarray  # ROW [R]
    # ADJUSTMENT [N]; those of a range have distinct tokens. What rows of a sequence share may be in a table instead.
    adjustments: np.ndarray

    def __len__(self) -> int:
        return len(self.records)

    @property
    def seeds(self) -> np.ndarray:
        """int64 [R]"""
        return self.records["seed"]

    @property
    def positions(self) -> np.ndarray:
        """int64 [R]"""
        return self.records["position"]

    @property
    def temperature(self) -> np.ndarray:
        """float32 [R]"""
        return self.records["temperature"]

    @cached_property
    def is_hot(self) -> np.ndarray:
        """bool [R]: noise is added."""
        return (self.records["flags"] & IS_HOT) != 0

    @cached_property
    def truncates(self) -> np.ndarray:
        """bool [R]: rows with top-k, top-p or min-p."""
        return (self.records["flags"] & TRUNCATES) != 0

    @cached_property
    def adjusts(self) -> np.ndarray:
        """bool [R]: rows with penalties or bias."""
        records = self.records
        return (records["begin"] < records["end"]) | (records["own_begin"] < records["own_end"])

    @cached_property
    def is_plain(self) -> np.ndarray:
        """bool [R]: rows whose token is the argmax of the raw logits."""
        return ~(self.is_hot | self.adjusts)

    @cached_property
    def is_greedy(self) -> bool:
        """Whether every row is plain argmax of the raw logits."""
        return bool(self.is_plain.all())

    def take(self, rows: np.ndarray) -> Self:
        """The given rows, int [S], in the given order."""
        return type(self)(self.records[np.asarray(rows, dtype=np.int64)], self.adjustments)

    def without_noise(self, rows: np.ndarray) -> Self:
        """All rows, the given ones, bool [R], as at temperature 0: penalties and bias stay."""
        records = self.records.copy()
        records["flags"][rows], records["temperature"][rows] = 0, 1.0
        return type(self)(records, self.adjustments)


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
    num_rows = len(row_sequence)
    if paths is None:
        if any(sequence.uses_history for sequence in sequences):
            raise ValueError("paths is None; penalties need the draft tokens on the path to each row")
        paths = Paths(_NO_TOKENS, np.zeros(num_rows + 1, np.int64))
    elif not isinstance(paths, Paths):
        paths = _joined(paths)
    if len(paths.offsets) != num_rows + 1:
        raise ValueError(f"paths has {len(paths.offsets) - 1} entries; it must have one per row, {num_rows}")
    records = np.empty(num_rows, ROW)
    addresses = addresses_of(sequences)
    ranges, room = shared_ranges(addresses, False)
    adjustments = np.empty(room + len(paths.tokens), ADJUSTMENT)
    used = fill_records(
        addresses,
        ranges,
        False,
        np.asarray(row_sequence, np.int64),
        np.asarray(positions, np.int64),
        np.asarray(paths.tokens, np.int32),
        paths.offsets,
        records,
        adjustments,
    )
    return RowSampling(records, adjustments[:used])


_NO_TOKENS = np.empty(0, np.int32)


def _joined(paths: Sequence[np.ndarray]) -> Paths:
    offsets = np.zeros(len(paths) + 1, np.int64)
    np.cumsum([len(path) for path in paths], out=offsets[1:])
    return Paths(np.concatenate([*paths, _NO_TOKENS]), offsets)


@njit(cache=True, nogil=True)
def shared_ranges(addresses, is_in_table):  # type: ignore[no-untyped-def]
    """Where the adjustments of each sequence begin and end, int32 [S, 2], and how many go with the rows.

    is_in_table: an `AdjustmentTable` has them, and none go with the rows.
    """
    ranges, end = np.empty((len(addresses), 2), np.int32), 0
    for s in range(len(addresses)):
        record = sampling_at(addresses[s])[0][0]
        if is_in_table:
            ranges[s, 0], ranges[s, 1] = record.table_begin, record.table_begin + record.num_distinct
        elif s > 0 and addresses[s] == addresses[s - 1]:
            ranges[s] = ranges[s - 1]
        else:
            ranges[s, 0], ranges[s, 1] = end, end + record.num_distinct
            end += record.num_distinct
    return ranges, end


@njit(cache=True, nogil=True)
def fill_records(  # type: ignore[no-untyped-def]
    addresses, ranges, is_in_table, row_sequence, positions, path_tokens, path_offsets, records, adjustments
):
    """Fill records and adjustments; returns the number of the latter. Arguments: as of `rows_for` and `shared_ranges`,
    which gives the ranges."""
    used = 0
    for s in range(0 if is_in_table else len(addresses)):
        if ranges[s, 1] > used:
            adjustments[used : ranges[s, 1]] = sampling_at(addresses[s])[1][: ranges[s, 1] - used]
            used = ranges[s, 1]
    for row in range(len(records)):
        record, s = records[row], row_sequence[row]
        one, shared, counts, places = sampling_at(addresses[s])
        sampling = one[0]
        record.seed, record.position = sampling.seed, positions[row]
        record.top_k, record.top_p, record.min_log_ratio = sampling.top_k, sampling.top_p, sampling.min_log_ratio
        record.temperature, record.slot = sampling.temperature, -1
        truncates = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_log_ratio > -np.inf
        record.flags = 0
        if sampling.is_hot:
            record.flags = IS_HOT | TRUNCATES if truncates else IS_HOT
        record.begin, record.end = ranges[s, 0], ranges[s, 1]
        record.own_begin = used
        if sampling.uses_history:
            for at in range(path_offsets[row], path_offsets[row + 1]):
                token, count, is_first = path_tokens[at], 0, True
                for other in range(path_offsets[row], path_offsets[row + 1]):
                    if path_tokens[other] == token:
                        count += 1
                        is_first = is_first and other >= at
                if not is_first:
                    continue
                place, _ = find_token(shared, places, token)
                own = adjustments[used]
                own.token, own.divisor, own.bias = token, sampling.repetition, 0.0
                if place >= 0:
                    count += counts[place]
                    own.bias = shared[place].bias
                own.subtrahend = subtrahend(sampling, count)
                used += 1
        record.own_end = used
    return used
