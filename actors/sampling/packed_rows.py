"""`RowSampling` as words, which go to a device in one copy; sizes that kernels and their callers share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from actors.sampling.processors import columns_of
from actors.sampling.rows import ROW, TRUNCATES, RowSampling
from actors.sampling.sequence_sampling import ADJUSTMENT

NUM_BINS = 2048  # of a row's histogram over the distance from the best score
_FIRST_SLOTS, _FIRST_ADJUSTMENTS = 8, 1024
MAX_CANDIDATES = 4096  # columns of one bin that are kept aside; with more the whole row is read again
ROW_WORDS, _ADJUSTMENT_WORDS = ROW.itemsize // 8, ADJUSTMENT.itemsize // 8


class PackedSampling(NamedTuple):
    """Parameters of rows, and what launches depend on, rounded up to few different values.

    On the device they are int64 words: a `ROW` per row, then the adjustments, whose tokens are columns, -1 for none.
    """

    rows: np.ndarray  # int64 [words of the rows with padding]
    adjustments: np.ndarray  # int64 [words]
    num_words: int  # with padding of the adjustments, which nothing reads
    num_slots: int  # at least the number of rows with adjustments
    truncates: bool  # whether a row has top-k, top-p or min-p

    @property
    def words(self) -> np.ndarray:
        """int64 [num_words]."""
        words = np.zeros(self.num_words, np.int64)
        words[: len(self.rows)] = self.rows
        words[len(self.rows) : len(self.rows) + len(self.adjustments)] = self.adjustments
        return words


def pack_sampling(
    rows: RowSampling, num_columns: int, num_rows: int | None = None, token_ids: np.ndarray | None = None
) -> PackedSampling:
    """num_rows: rows with padding, which are argmax; None: without. token_ids: as for `columns_of`. Raises ValueError
    when the rows do not fit."""
    size = len(rows) if num_rows is None else num_rows
    if size < len(rows):
        raise ValueError(f"{len(rows)} rows do not fit {size}")
    adjustments = rows.adjustments
    if token_ids is not None and len(adjustments):
        adjustments = adjustments.copy()
        adjustments["token"] = columns_of(rows.adjustments["token"], num_columns, token_ids)
    packed = np.empty(size, ROW)
    packed[: len(rows)] = rows.records
    num_slots, truncates = complete_rows(packed, len(rows))
    return PackedSampling(
        rows=packed.view(np.int64),
        adjustments=adjustments.view(np.int64),
        num_words=words_of(size, len(adjustments)),
        num_slots=slots_of(size, num_slots),
        truncates=truncates,
    )


def words_of(num_rows: int, num_adjustments: int) -> int:
    """int64 words of this many rows and adjustments, with padding of the adjustments."""
    return num_rows * ROW_WORDS + _tier(num_adjustments, _FIRST_ADJUSTMENTS) * _ADJUSTMENT_WORDS


def slots_of(num_rows: int, num_adjusted: int) -> int:
    """Slots for the rows with adjustments, with padding."""
    return min(num_rows, _tier(num_adjusted, _FIRST_SLOTS))


def sampling_in(words: np.ndarray, num_rows: int, size: int, num_adjustments: int) -> RowSampling:
    """The parameters in packed words, int64: num_rows rows, padded to `size` rows, then num_adjustments adjustments."""
    rows = words[: num_rows * ROW_WORDS].view(ROW)
    adjustments = words[size * ROW_WORDS :][: num_adjustments * _ADJUSTMENT_WORDS].view(ADJUSTMENT)
    return RowSampling(rows, adjustments)


def _tier(count: int, first: int) -> int:
    """The least of 0, `first`, 4 * `first`, 16 * `first`, ... that is not below."""
    tier = first if count else 0
    while tier < count:
        tier *= 4
    return tier


def word_of(field: str) -> int:
    """Offset of a field of `ROW`, in words of the field's type."""
    assert ROW.fields is not None
    dtype, offset = ROW.fields[field][:2]
    return offset // dtype.itemsize


@njit(cache=True, nogil=True)
def complete_rows(packed, num_rows):  # type: ignore[no-untyped-def]
    """Fill the padding of ROW [R] after its first num_rows rows with argmax rows, and give a slot to each row with
    adjustments. Returns the number of slots, and whether any row truncates."""
    num_slots, truncates = 0, False
    for row in range(len(packed)):
        record = packed[row]
        record.slot = -1
        if row >= num_rows:
            record.seed = record.position = record.top_k = 0
            record.top_p, record.temperature, record.min_log_ratio = 1.0, 1.0, -np.inf
            record.flags = record.begin = record.end = record.own_begin = record.own_end = 0
            continue
        truncates = truncates or record.flags & TRUNCATES != 0
        if record.end > record.begin or record.own_end > record.own_begin:
            record.slot = num_slots
            num_slots += 1
    return num_slots, truncates
