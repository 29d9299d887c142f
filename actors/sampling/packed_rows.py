"""`RowSampling` as one array, which goes to a device in one copy; sizes that kernels and their callers share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from actors.sampling.processors import columns_of
from actors.sampling.rows import RowSampling

ROW = np.dtype(
    [
        ("seed", "<i8"),
        ("position", "<i8"),
        ("top_k", "<i8"),
        ("top_p", "<f8"),
        ("temperature", "<f4"),
        ("min_log_ratio", "<f4"),
        ("flags", "<i4"),
        ("slot", "<i4"),  # among the rows with adjustments; -1 for others
        ("begin", "<i8"),  # of the adjustments
        ("end", "<i8"),
    ]
)
ENTRY = np.dtype([("column", "<i4"), ("divisor", "<f4"), ("subtrahend", "<f4"), ("bias", "<f4")])
IS_HOT, TRUNCATES = 1, 2  # flags

NUM_BINS = 2048  # of a row's histogram over the distance from the best score
_FIRST_SLOTS, _FIRST_ENTRIES = 8, 1024
MAX_CANDIDATES = 4096  # columns of one bin that are kept aside; with more the whole row is read again


class PackedSampling(NamedTuple):
    """Parameters of rows, and what launches depend on, rounded up to few different values."""

    words: np.ndarray  # int64, of `pack_rows`
    num_slots: int  # at least the number of rows with adjustments
    truncates: bool  # whether a row has top-k, top-p or min-p


def pack_sampling(
    rows: RowSampling, num_columns: int, num_rows: int, token_ids: np.ndarray | None = None
) -> PackedSampling:
    """num_rows: rows with padding. token_ids: as for `columns_of`."""
    num_entries = len(rows.tokens)
    columns = columns_of(rows.tokens, num_columns, token_ids) if num_entries else None
    words, num_slots, truncates = _pack(rows, columns, num_rows, _tier(num_entries, _FIRST_ENTRIES))
    return PackedSampling(words, min(num_rows, _tier(num_slots, _FIRST_SLOTS)), truncates)


def _tier(count: int, first: int) -> int:
    """The least of 0, `first`, 4 * `first`, 16 * `first`, ... that is not below."""
    tier = first if count else 0
    while tier < count:
        tier *= 4
    return tier


def word_of(field: str) -> int:
    """Where a field of `ROW` lies, in words of its own type."""
    assert ROW.fields is not None
    dtype, offset = ROW.fields[field][:2]
    return offset // dtype.itemsize


def pack_rows(
    rows: RowSampling, columns: np.ndarray | None = None, num_rows: int | None = None, num_entries: int | None = None
) -> np.ndarray:
    """The parameters as int64 words: a `ROW` per row, then an `ENTRY` per adjusted token.

    columns: int [N], the column of each of `rows.tokens`, -1 for none; None: the tokens themselves. num_rows,
    num_entries: sizes of a larger batch, whose further rows are argmax. Raises ValueError when the rows or entries do
    not fit.
    """
    size = len(rows) if num_rows is None else num_rows
    entries = len(rows.tokens) if num_entries is None else num_entries
    return _pack(rows, columns, size, entries)[0]


def _pack(
    rows: RowSampling, columns: np.ndarray | None, num_rows: int, num_entries: int
) -> tuple[np.ndarray, int, bool]:
    """The words of `pack_rows`, the number of rows with adjustments, and whether a row truncates."""
    if num_rows < len(rows) or num_entries < len(rows.tokens):
        raise ValueError(
            f"{len(rows)} rows with {len(rows.tokens)} adjustments do not fit {num_rows} with {num_entries}"
        )
    words = np.zeros(num_rows * _ROW_WORDS + num_entries * _ENTRY_WORDS, np.int64)
    num_slots, truncates = _fill(
        words,
        words.view(np.float64),
        words.view(np.int32),
        words.view(np.float32),
        num_rows,
        rows.seeds,
        rows.positions,
        rows.is_hot,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_log_ratio,
        rows.offsets,
        rows.tokens if columns is None else columns,
        rows.divisor,
        rows.subtrahend,
        rows.bias,
    )
    return words, int(num_slots), bool(truncates)


_ROW_WORDS, _ENTRY_WORDS = ROW.itemsize // 8, ENTRY.itemsize // 8
# Of `ROW`, in words of each field's own type.
_SEED, _POSITION, _TOP_K, _TOP_P = word_of("seed"), word_of("position"), word_of("top_k"), word_of("top_p")
_TEMPERATURE, _MIN_LOG_RATIO = word_of("temperature"), word_of("min_log_ratio")
_FLAGS, _SLOT, _BEGIN, _END = word_of("flags"), word_of("slot"), word_of("begin"), word_of("end")


@njit(cache=True, nogil=True)
def _fill(  # type: ignore[no-untyped-def]
    words, doubles, halves, floats, size,
    seeds, positions, is_hot, temperature, top_k, top_p, min_log_ratio, offsets, columns, divisor, subtrahend, bias,
):  # fmt: skip
    """Write what `pack_rows` says into zeros, seen as int64, float64, int32 and float32. Returns the number of rows
    with adjustments and whether a row truncates."""
    num_slots, any_truncates = 0, False
    for row in range(size):
        word, half = row * _ROW_WORDS, row * _ROW_WORDS * 2
        halves[half + _SLOT] = -1
        if row >= len(seeds):
            doubles[word + _TOP_P], floats[half + _TEMPERATURE] = 1.0, 1.0
            floats[half + _MIN_LOG_RATIO] = -np.inf
            continue
        words[word + _SEED], words[word + _POSITION], words[word + _TOP_K] = seeds[row], positions[row], top_k[row]
        doubles[word + _TOP_P], floats[half + _TEMPERATURE] = top_p[row], temperature[row]
        floats[half + _MIN_LOG_RATIO] = min_log_ratio[row]
        truncates = is_hot[row] and (top_k[row] > 0 or top_p[row] < 1.0 or min_log_ratio[row] > -np.inf)
        any_truncates = any_truncates or truncates
        halves[half + _FLAGS] = (IS_HOT if is_hot[row] else 0) + (TRUNCATES if truncates else 0)
        words[word + _BEGIN], words[word + _END] = offsets[row], offsets[row + 1]
        if offsets[row + 1] > offsets[row]:
            halves[half + _SLOT] = num_slots
            num_slots += 1
    first = 2 * _ROW_WORDS * size
    for entry in range(len(columns)):
        at = first + 2 * _ENTRY_WORDS * entry
        halves[at] = columns[entry]
        floats[at + 1], floats[at + 2], floats[at + 3] = divisor[entry], subtrahend[entry], bias[entry]
    return num_slots, any_truncates
