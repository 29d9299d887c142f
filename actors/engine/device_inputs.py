"""What a forward on an accelerator reads, at the same addresses for all forwards of a shape.

Numbers of rows, sequences and slots are rounded up to few different ones, so that a recorded launch sequence fits many
rounds.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Sequences
from typing import NamedTuple

import numpy as np
import torch

from actors.engine.arena import Arena, Part
from actors.engine.attention.tree_rows import TreeRows
from actors.engine.batch import PackedBatch
from actors.engine.row_tiers import context_tier, power_tier, row_tier


class DeviceInputs(NamedTuple):
    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R]
    logit_rows: torch.Tensor  # int64 [L]; those of padding are 0
    rows: TreeRows
    moves: torch.Tensor  # int64 [2, M]: slots to copy before the forward; those of padding copy the padding slot
    more: Sequences[torch.Tensor]  # what the caller has sent along
    updates: Sequences[torch.Tensor]  # likewise, but read before the forward
    block_size: int
    max_context: int  # slots that the longest sequence may have
    key: Hashable  # inputs of the same key differ in nothing but the contents of tensors, `moves` and `updates`


def send_inputs(
    arena: Arena,
    batch: PackedBatch,
    logit_rows: np.ndarray,
    num_logits: int,
    moves: np.ndarray,
    padding_slot: int,
    more: Sequences[Part] = (),
    updates: Sequences[Part] = (),
) -> DeviceInputs:
    """One copy to the device, which must have read the inputs before the next.

    logit_rows: int64. num_logits: their number with padding. moves: int64 [2, n], sources and destinations.
    padding_slot: where rows of padding are written.
    """
    rows, sequences = row_tier(batch.num_rows), power_tier(len(batch.begins))
    words = batch.ancestors.shape[1]
    max_context = context_tier(int(batch.contexts.max()))
    table_width = -(-max_context // batch.block_size)
    tables = batch.block_tables[:, :table_width]
    parts = [
        Part(batch.token_ids, (rows,)),
        Part(batch.positions, (rows,)),
        Part(logit_rows, (num_logits,)),
        # As in `TreeRows`
        Part(batch.slots, (rows,), padding_slot),
        Part(batch.first_rows, (sequences + 1,), batch.num_rows),
        Part(batch.begins, (sequences,)),
        Part(batch.tree_starts, (sequences,)),
        Part(tables, (sequences, table_width)),
        Part(batch.visible_ends, (rows,)),
        Part(batch.ancestors, (rows, words)),
        Part(batch.positions.astype(np.int32), (rows,)),
        Part(batch.node_positions, (sequences, batch.node_positions.shape[1])),
        *more,
    ]  # fmt: skip
    # Moves and updates come last: their number changes no other address.
    sent = arena.send([*parts, Part(moves, (2, power_tier(moves.shape[1])), padding_slot), *updates])
    token_ids, positions, places, *tree_rows = sent[: 3 + len(TreeRows._fields)]
    return DeviceInputs(
        token_ids=token_ids,
        positions=positions,
        logit_rows=places,
        rows=TreeRows(*tree_rows),
        moves=sent[len(parts)],
        more=sent[3 + len(TreeRows._fields) : len(parts)],
        updates=sent[len(parts) + 1 :],
        block_size=batch.block_size,
        max_context=max_context,
        key=(arena.generation, batch.block_size, max_context, tuple([part.shape for part in parts])),
    )
