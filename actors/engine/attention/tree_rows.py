"""The rows of a forward as flat arrays on the device, which a kernel reads without any mask."""

from __future__ import annotations

from typing import NamedTuple

import torch

WRITTEN_ONLY = -1  # in `begins`: the sequence's keys and values are written, and its rows' results are left undefined


class TreeRows(NamedTuple):
    """The arrays of a `PackedBatch` of S sequences. Rows from first_rows[S] on are padding, which see nothing;
    sequences without rows may follow the batch's own. All are contiguous."""

    slots: torch.Tensor  # int64 [rows]: where each row's keys and values are written
    first_rows: torch.Tensor  # int32 [S + 1]
    begins: torch.Tensor  # int32 [S], or `WRITTEN_ONLY`
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
