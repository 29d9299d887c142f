"""`RowSampling` as one array, which goes to a device in one copy; sizes that kernels and their callers share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
    num_entries, num_slots = len(rows.tokens), int(np.count_nonzero(np.diff(rows.offsets)))
    columns = columns_of(rows.tokens, num_columns, token_ids) if num_entries else None
    words = pack_rows(rows, columns, num_rows, _tier(num_entries, _FIRST_ENTRIES))
    return PackedSampling(words, min(num_rows, _tier(num_slots, _FIRST_SLOTS)), bool(rows.truncates.any()))


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
    if size < len(rows) or entries < len(rows.tokens):
        raise ValueError(f"{len(rows)} rows with {len(rows.tokens)} adjustments do not fit {size} with {entries}")
    packed = np.zeros(size * ROW.itemsize + entries * ENTRY.itemsize, np.uint8)
    records, used = packed[: size * ROW.itemsize].view(ROW), slice(0, len(rows))
    records["temperature"], records["top_p"], records["min_log_ratio"], records["slot"] = 1.0, 1.0, -np.inf, -1
    for name in ("seed", "position"):
        records[name][used] = getattr(rows, name + "s")
    for name in ("top_k", "top_p", "temperature", "min_log_ratio"):
        records[name][used] = getattr(rows, name)
    records["flags"][used] = rows.is_hot * IS_HOT + rows.truncates * TRUNCATES
    adjusts = rows.offsets[1:] > rows.offsets[:-1]
    records["slot"][used] = np.where(adjusts, adjusts.cumsum() - 1, -1)
    records["begin"][used], records["end"][used] = rows.offsets[:-1], rows.offsets[1:]
    adjustments = packed[size * ROW.itemsize :].view(ENTRY)[: len(rows.tokens)]
    adjustments["column"] = rows.tokens if columns is None else columns
    for name in ("divisor", "subtrahend", "bias"):
        adjustments[name] = getattr(rows, name)
    return packed.view(np.int64)
