"""The rows of a forward as flat arrays on the device, which a kernel reads without any mask."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from actors.engine.batch import PackedBatch

_ALIGNMENT = 16  # bytes; kernels load aligned arrays in wide words


class TreeRows(NamedTuple):
    """The arrays of a `PackedBatch` of S sequences, with rows of padding from first_rows[S] on."""

    slots: torch.Tensor  # int64 [rows]: where each row's keys and values are written
    first_rows: torch.Tensor  # int32 [S + 1]
    begins: torch.Tensor  # int32 [S]
    tree_starts: torch.Tensor  # int32 [S]
    block_tables: torch.Tensor  # int32 [S, max_blocks]
    visible_ends: torch.Tensor  # int32 [rows]
    ancestors: torch.Tensor  # int64 [rows, words]
    row_positions: torch.Tensor  # int32 [rows]
    node_positions: torch.Tensor  # int32 [S, 64 * words]

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_sequences(self) -> int:
        return len(self.begins)


def tree_rows(batch: PackedBatch, num_rows: int, padding_slot: int, device: torch.device) -> TreeRows:
    """The arrays of a batch, by one copy to the device; rows after its own are padding, which see nothing."""
    num_sequences, words = len(batch.begins), batch.ancestors.shape[1]
    # Elements and strides of each array, and the bytes of an element, in the order of `TreeRows`
    layout = (
        ((num_rows,), (1,), 8),
        ((num_sequences + 1,), (1,), 4),
        ((num_sequences,), (1,), 4),
        ((num_sequences,), (1,), 4),
        (batch.block_tables.shape, (batch.block_tables.shape[1], 1), 4),
        ((num_rows,), (1,), 4),
        ((num_rows, words), (words, 1), 8),
        ((num_rows,), (1,), 4),
        (batch.node_positions.shape, (batch.node_positions.shape[1], 1), 4),
    )
    offsets = [0]
    for shape, strides, size in layout:
        num_bytes = shape[0] * strides[0] * size
        offsets.append(offsets[-1] + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
    buffer = np.zeros(offsets[-1] // 8, dtype=np.int64)
    _fill(
        buffer,
        buffer.view(np.int32),
        np.array(offsets),
        num_rows,
        padding_slot,
        batch.slots,
        batch.first_rows,
        batch.begins,
        batch.tree_starts,
        batch.block_tables,
        batch.visible_ends,
        batch.ancestors,
        batch.positions,
        batch.node_positions,
    )
    copied = torch.from_numpy(buffer).to(device)
    words_of = {8: copied, 4: copied.view(torch.int32)}
    return TreeRows(
        *(
            words_of[size].as_strided(shape, strides, offset // size)
            for (shape, strides, size), offset in zip(layout, offsets, strict=False)
        )
    )


@njit(cache=True, nogil=True)
def _fill(
    long_words: np.ndarray,  # int64; the arrays lie at `offsets`, in bytes
    words: np.ndarray,  # int32, the same memory
    offsets: np.ndarray,
    num_rows: int,
    padding_slot: int,
    slots: np.ndarray,
    first_rows: np.ndarray,
    begins: np.ndarray,
    tree_starts: np.ndarray,
    block_tables: np.ndarray,
    visible_ends: np.ndarray,
    ancestors: np.ndarray,
    positions: np.ndarray,
    node_positions: np.ndarray,
) -> None:
    own = len(slots)
    at = offsets[0] // 8
    long_words[at : at + own] = slots
    long_words[at + own : at + num_rows] = padding_slot
    for place, array in ((1, first_rows), (2, begins), (3, tree_starts), (5, visible_ends)):
        at = offsets[place] // 4
        words[at : at + len(array)] = array
    for place, table in ((4, block_tables), (8, node_positions)):
        at = offsets[place] // 4
        words[at : at + table.size] = table.ravel()
    at = offsets[6] // 8
    long_words[at : at + ancestors.size] = ancestors.ravel()
    at = offsets[7] // 4
    for row in range(own):
        words[at + row] = positions[row]
