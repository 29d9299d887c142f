"""What a forward on an accelerator reads, at the same addresses for all forwards of a shape.

Numbers of rows, sequences and slots are rounded up to few different ones, so that a recorded launch sequence fits many
rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Sequences
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from actors.engine.arena import ALIGNMENT, Arena, Part, Views, Written
from actors.engine.attention.prompt_chunks import PackedChunks, PromptChunks
from actors.engine.attention.tree_rows import TreeRows
from actors.engine.batch import NODES_OF_A_WORD, PackedBatch
from actors.engine.row_tiers import context_tier, power_tier, row_tier

_NUM_VIEWS = 3 + len(TreeRows._fields)
SAMPLING_PLACE = _NUM_VIEWS  # index of the sampling parameters among a layout's arrays; the trees follow


class Shape(NamedTuple):
    """Sizes with padding."""

    rows: int
    sequences: int
    words: int  # of ancestor bits
    max_context: int
    block_size: int
    logits: int
    trees: int = 0  # that tokens are drawn after; 0: nothing is drawn
    sampling: int = 0  # int64 words of the sampling parameters


class DeviceInputs(NamedTuple):
    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R]
    logit_rows: torch.Tensor  # int64 [L]; those of padding are 0
    rows: TreeRows
    moves: torch.Tensor  # int64 [2, M]: slots to copy before the forward; those of padding copy the padding slot
    # If tokens are drawn: parameters as in `PackedSampling`; tokens and parents of the trees' nodes, int32 [L] each;
    # where each tree begins, [trees + 1], NO_TREE for padding. Then the caller's own arrays.
    more: Sequences[torch.Tensor]
    updates: Sequences[torch.Tensor]  # likewise, but read before the forward
    block_size: int
    max_context: int  # slots that the longest sequence may have
    # Inputs of the same key differ in nothing but the contents of tensors, `moves`, `updates`, `chunks` and `batch`.
    key: Hashable
    chunks: PromptChunks | None = None  # None: all rows attend as `rows` says
    batch: PackedBatch | None = None  # on the host, if a plan needs it


def send_inputs(
    arena: Arena,
    batch: PackedBatch,
    logit_rows: np.ndarray,
    num_logits: int,
    moves: np.ndarray,
    padding_slot: int,
    more: Sequences[Part] = (),
    chunks: PackedChunks | None = None,
) -> DeviceInputs:
    """Send a batch in one copy. The device must have read it before the next one is sent.

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
    write = partial(_write_batch, batch, logit_rows, padding_slot)
    return send_written(arena, shape, write, moves, padding_slot, more, chunks=chunks)


def _write_batch(
    batch: PackedBatch, logit_rows: np.ndarray, padding_slot: int, words: np.ndarray, places: np.ndarray, shape: Shape
) -> None:
    _copy_batch(words, places, *shape[:6], padding_slot, logit_rows, *batch[1:-1])


def send_written(
    arena: Arena,
    shape: Shape,
    write: Callable[[np.ndarray, np.ndarray, Shape], object],
    moves: np.ndarray,
    padding_slot: int,
    more: Sequences[Part] = (),
    updates: Sequences[Part] = (),
    chunks: PackedChunks | None = None,
) -> DeviceInputs:
    """As `send_inputs`. write: fills int64 words; its arguments are the words, the offsets of the arrays in them
    (see `arrays_in`), and the shape."""
    places, views, num_words = _layout_of(shape)
    # Moves, updates and chunks come last: their number changes no other address.
    parts = [*more, Part(moves, (2, power_tier(moves.shape[1])), padding_slot), *updates]
    end_updates = len(views.views) + len(parts)
    if chunks is not None:
        # Three dimensions, since arrays of the same shapes are taken for the same arrays.
        parts.append(Part(chunks.words[None, None], (1, 1, power_tier(len(chunks.words)))))

    def inputs_of(sent: list[torch.Tensor]) -> tuple[DeviceInputs, torch.Tensor]:
        first_update = end_updates - len(updates)
        token_ids, positions, logit_places = sent[:3]
        inputs = DeviceInputs(
            token_ids=token_ids,
            positions=positions,
            logit_rows=logit_places,
            rows=TreeRows(*sent[3:_NUM_VIEWS]),
            moves=sent[first_update - 1],
            more=sent[_NUM_VIEWS : first_update - 1],
            updates=sent[first_update:end_updates],
            block_size=shape.block_size,
            max_context=shape.max_context,
            key=(arena.generation, shape, tuple([part.shape for part in more])),
        )
        return inputs, sent[-1]

    written = Written(num_words, views, lambda words: write(words, places, shape))
    inputs, last = arena.send(written, parts, inputs_of)
    return inputs if chunks is None else inputs._replace(chunks=chunks.on_device(last[0, 0]))


@lru_cache(1024)
def _layout_of(shape: Shape) -> tuple[np.ndarray, Views, int]:
    """The offset of each array in int64 words, int64; the arrays on the device; and the number of words."""
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
    if shape.trees:
        arrays += [
            (np.int64, (shape.sampling,)),
            (np.int32, (shape.logits,)),
            (np.int32, (shape.logits,)),
            (np.int32, (shape.trees + 1,)),
        ]
    places, views, end = [], [], 0
    for kind, own_shape in arrays:
        places.append(end // 8)
        views.append((end, kind, own_shape))
        end += -(-math.prod(own_shape) * np.dtype(kind).itemsize // ALIGNMENT) * ALIGNMENT
    return np.array(places), Views(views), end // 8


@njit(cache=True, nogil=True)
def ints_in(longs, place, count):  # type: ignore[no-untyped-def]
    """int32 [count] from a place in int64 words."""
    return longs[place : place + (count + 1) // 2].view(np.int32)[:count]


@njit(cache=True, nogil=True)
def arrays_in(longs, places, rows, sequences, words, max_context, block_size, logits):  # type: ignore[no-untyped-def]
    """The arrays of `DeviceInputs` in int64 words, in the order of `_layout_of`."""
    table, nodes = -(-max_context // block_size), NODES_OF_A_WORD * words
    return (
        longs[places[0] : places[0] + rows],
        longs[places[1] : places[1] + rows],
        longs[places[2] : places[2] + logits],
        longs[places[3] : places[3] + rows],
        ints_in(longs, places[4], sequences + 1),
        ints_in(longs, places[5], sequences),
        ints_in(longs, places[6], sequences),
        ints_in(longs, places[7], sequences * table).reshape((sequences, table)),
        ints_in(longs, places[8], rows),
        longs[places[9] : places[9] + rows * words].reshape((rows, words)),
        ints_in(longs, places[10], rows),
        ints_in(longs, places[11], sequences * nodes).reshape((sequences, nodes)),
    )


@njit(cache=True, nogil=True)
def pad_rows(positions, slots, first_rows, positions32, num_rows, num_sequences, padding_slot):  # type: ignore[no-untyped-def]
    """Fill the padding after the first num_rows rows and num_sequences sequences, and the arrays derived from them."""
    slots[num_rows:] = padding_slot
    first_rows[num_sequences + 1 :] = num_rows
    for row in range(num_rows):
        positions32[row] = positions[row]


@njit(cache=True, nogil=True)
def _copy_batch(  # type: ignore[no-untyped-def]
    longs, places, rows, sequences, words, max_context, block_size, logits, padding_slot, logit_rows, token_ids,
    positions, slots, first_rows, begins, tree_starts, block_tables, visible_ends, ancestors, node_positions,
):  # fmt: skip
    """Write the arrays of a `PackedBatch`, and zeros around them."""
    longs[:] = 0
    (
        token_ids_there, positions_there, logits_there, slots_there, first_rows_there, begins_there, starts_there,
        tables_there, ends_there, ancestors_there, positions32, nodes_there,
    ) = arrays_in(longs, places, rows, sequences, words, max_context, block_size, logits)  # fmt: skip
    num_rows, num_sequences = len(token_ids), len(begins)
    token_ids_there[:num_rows] = token_ids
    positions_there[:num_rows] = positions
    logits_there[: len(logit_rows)] = logit_rows
    slots_there[:num_rows] = slots
    first_rows_there[: num_sequences + 1] = first_rows
    begins_there[:num_sequences] = begins
    starts_there[:num_sequences] = tree_starts
    width = min(tables_there.shape[1], block_tables.shape[1])
    tables_there[:num_sequences, :width] = block_tables[:, :width]
    ends_there[:num_rows] = visible_ends
    ancestors_there[:num_rows] = ancestors
    nodes_there[:num_sequences] = node_positions
    pad_rows(positions_there, slots_there, first_rows_there, positions32, num_rows, num_sequences, padding_slot)
