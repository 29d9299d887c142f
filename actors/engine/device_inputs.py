"""What a forward on an accelerator reads, at the same addresses for all forwards of a shape.

Numbers of rows, sequences and slots are rounded up to few different ones, so that a recorded launch sequence fits many
rounds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from collections.abc import Sequence as Sequences
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from actors.engine.arena import ALIGNMENT, Arena, Part, Views
from actors.engine.attention.prompt_chunks import PackedChunks, PromptChunks
from actors.engine.attention.tree_rows import TreeRows
from actors.engine.batch import NODES_OF_A_WORD, PackedBatch
from actors.engine.row_tiers import context_tier, power_tier, row_tier

_NUM_VIEWS = 3 + len(TreeRows._fields)


class Shape(NamedTuple):
    """Sizes with padding."""

    rows: int
    sequences: int
    words: int  # of ancestor bits
    max_context: int
    block_size: int
    logits: int


class DeviceInputs(NamedTuple):
    batch: PackedBatch  # on the host
    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R]
    logit_rows: torch.Tensor  # int64 [L]; those of padding are 0
    rows: TreeRows
    chunks: PromptChunks | None  # without them, all rows attend as `rows` says
    moves: torch.Tensor  # int64 [2, M]: slots to copy before the forward; those of padding copy the padding slot
    more: Sequences[torch.Tensor]  # what the caller has sent along
    updates: Sequences[torch.Tensor]  # likewise, but read before the forward
    block_size: int
    max_context: int  # slots that the longest sequence may have
    # Inputs of the same key differ in nothing but `batch`, the contents of tensors, `chunks`, `moves` and `updates`.
    key: Hashable


def send_inputs(
    arena: Arena,
    batch: PackedBatch,
    logit_rows: np.ndarray,
    num_logits: int,
    moves: np.ndarray,
    padding_slot: int,
    more: Sequences[Part] = (),
    updates: Sequences[Part] = (),
    chunks: PackedChunks | None = None,
) -> DeviceInputs:
    """One copy to the device, which must have read the inputs before the next.

    logit_rows: int64. num_logits: their number with padding. moves: int64 [2, n], sources and destinations.
    padding_slot: where rows of padding are written.
    """
    shape = Shape(
        rows=row_tier(batch.num_rows),
        sequences=power_tier(len(batch.begins)),
        words=batch.ancestors.shape[1],
        max_context=context_tier(batch.max_context),
        block_size=batch.block_size,
        logits=num_logits,
    )
    places, views, num_words = _layout_of(shape)
    buffer = np.zeros(num_words, np.int64)
    _fill(buffer, buffer.view(np.int32), places, shape, padding_slot, logit_rows, *batch[1:-1])
    # Moves, updates and chunks come last: their number changes no other address.
    parts = [Part(buffer, (num_words,), views=views), *more, Part(moves, (2, power_tier(moves.shape[1])), padding_slot)]
    chunk_parts = [] if chunks is None else [Part(chunks.words, (power_tier(len(chunks.words)),))]
    sent = arena.send([*parts, *updates, *chunk_parts])
    end_updates = len(sent) - len(chunk_parts)
    first_update = end_updates - len(updates)
    token_ids, positions, logit_places = sent[:3]
    return DeviceInputs(
        batch=batch,
        token_ids=token_ids,
        positions=positions,
        logit_rows=logit_places,
        rows=TreeRows(*sent[3:_NUM_VIEWS]),
        chunks=None if chunks is None else chunks.on_device(sent[-1]),
        moves=sent[first_update - 1],
        more=sent[_NUM_VIEWS : first_update - 1],
        updates=sent[first_update:end_updates],
        block_size=batch.block_size,
        max_context=shape.max_context,
        key=(arena.generation, shape, tuple([part.shape for part in more])),
    )


@lru_cache(1024)
def _layout_of(shape: Shape) -> tuple[np.ndarray, Views, int]:
    """Where each array begins, in elements of its type, int64; the arrays on the device; and int64 words of all."""
    rows, sequences, table = shape.rows, shape.sequences, -(-shape.max_context // shape.block_size)
    arrays: list[tuple[type[np.generic], tuple[int, ...]]] = [
        (np.int64, (rows,)),  # token ids
        (np.int64, (rows,)),  # positions
        (np.int64, (shape.logits,)),
        # As in `TreeRows`
        (np.int64, (rows,)),
        (np.int32, (sequences + 1,)),
        (np.int32, (sequences,)),
        (np.int32, (sequences,)),
        (np.int32, (sequences, table)),
        (np.int32, (rows,)),
        (np.int64, (rows, shape.words)),
        (np.int32, (rows,)),
        (np.int32, (sequences, NODES_OF_A_WORD * shape.words)),
    ]
    places, views, end = [], [], 0
    for kind, own_shape in arrays:
        size = np.dtype(kind).itemsize
        places.append(end // size)
        views.append((end, kind, own_shape))
        end += -(-math.prod(own_shape) * size // ALIGNMENT) * ALIGNMENT
    return np.array(places), Views(views), end // 8


@njit(cache=True, nogil=True)
def _fill(  # type: ignore[no-untyped-def]
    longs, ints, places, shape, padding_slot, logit_rows, token_ids, positions, slots, first_rows, begins, tree_starts,
    block_tables, visible_ends, ancestors, node_positions,
):  # fmt: skip
    """Write the arrays of a `PackedBatch` and what pads them into zeros, seen as int64 and as int32."""
    num_rows, num_sequences = len(token_ids), len(begins)
    longs[places[0] : places[0] + num_rows] = token_ids
    longs[places[1] : places[1] + num_rows] = positions
    longs[places[2] : places[2] + len(logit_rows)] = logit_rows
    longs[places[3] : places[3] + num_rows] = slots
    longs[places[3] + num_rows : places[3] + shape.rows] = padding_slot
    ints[places[4] : places[4] + num_sequences + 1] = first_rows
    ints[places[4] + num_sequences + 1 : places[4] + shape.sequences + 1] = num_rows
    ints[places[5] : places[5] + num_sequences] = begins
    ints[places[6] : places[6] + num_sequences] = tree_starts
    table = -(-shape.max_context // shape.block_size)
    width = min(table, block_tables.shape[1])
    nodes = node_positions.shape[1]
    for s in range(num_sequences):
        ints[places[7] + s * table : places[7] + s * table + width] = block_tables[s, :width]
        ints[places[11] + s * nodes : places[11] + (s + 1) * nodes] = node_positions[s]
    ints[places[8] : places[8] + num_rows] = visible_ends
    longs[places[9] : places[9] + num_rows * shape.words] = ancestors.reshape(-1)
    for row in range(num_rows):
        ints[places[10] + row] = positions[row]
