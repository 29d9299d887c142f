"""Flat arrays of a batch say of every row and slot what it may see."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.arena import Arena
from actors.engine.batch import PackedBatch
from actors.engine.device_inputs import DeviceInputs, send_inputs
from actors.engine.row_tiers import row_tier
from paceline_testing.forests import forest_of
from paceline_testing.random_forests import forests


def sent(batch: PackedBatch, padding_slot: int = 9999, arena: Arena | None = None) -> DeviceInputs:
    logit_rows, moves = np.arange(batch.num_rows)[-2:], np.array([[3, 4, 5], [6, 7, 8]])
    arena = arena or Arena(torch.device("cpu"))
    return send_inputs(arena, batch, logit_rows, 5, moves, padding_slot)


def arrays_of(batch: PackedBatch, padding_slot: int = 9999) -> SimpleNamespace:
    """`TreeRows` as numpy arrays."""
    rows = sent(batch, padding_slot).rows
    assert len({tensor.untyped_storage().data_ptr() for tensor in rows}) == 1, "one copy to the device"
    assert all(tensor.data_ptr() % 16 == 0 for tensor in rows)
    return SimpleNamespace(**{name: tensor.numpy() for name, tensor in rows._asdict().items()})


def seen(rows: SimpleNamespace, index: int, context: int, window: int | None) -> np.ndarray:
    """bool [own rows, context], from the arrays alone."""
    own = slice(rows.first_rows[index], rows.first_rows[index + 1])
    start = rows.tree_starts[index]
    slots = np.arange(context)
    nodes = np.maximum(slots - start, 0)
    bits = rows.ancestors[own][:, nodes // 64] >> (nodes % 64) & 1
    positions = np.where(slots < start, slots, rows.node_positions[index][nodes])
    allowed = (slots[None] < rows.visible_ends[own][:, None]) | ((bits == 1) & (slots >= start)[None])
    if window is not None:
        allowed &= rows.row_positions[own][:, None] - positions[None] < window
    return allowed


@given(forests(max_nodes=150), st.sampled_from([None, 1, 2, 7, 40]))
def test_every_row_sees_what_it_may_see(forest, window):
    batch = forest.batch
    rows = arrays_of(batch)
    for index, part in enumerate(forest.parts):
        visible = forest.visible(index, window)
        assert (seen(rows, index, visible.shape[1], window) == visible).all()
        blocks = part.sequence.blocks[: -(-visible.shape[1] // forest.block_size)].tolist()
        assert rows.block_tables[index][: len(blocks)].tolist() == blocks
    assert (rows.slots[: batch.num_rows] == batch.slots).all()
    assert (rows.row_positions[: batch.num_rows] == batch.positions).all()
    assert rows.ancestors.shape[1] in (1, 2, 4)


def test_a_tree_as_large_as_a_word_uses_its_highest_bit():
    parents = [-1, -1, 0, *range(2, 63)]  # the last node sees all but node 1
    rows = arrays_of(forest_of([(6, 5, parents, 0)], block_size=1).batch)
    assert rows.ancestors.shape == (row_tier(65), 1)
    assert int(rows.ancestors[64, 0]) == -1 - 2


@given(forests())
def test_rows_and_sequences_of_padding_see_nothing_and_write_into_the_padding_slot(forest):
    batch = forest.batch
    rows = arrays_of(batch)
    count = len(batch.begins)
    assert len(rows.slots) == row_tier(batch.num_rows)
    assert len(rows.begins) == row_tier(count)
    assert (rows.slots[batch.num_rows :] == 9999).all()
    assert (rows.first_rows[count:] == batch.num_rows).all()
    for name in ("first_rows", "begins", "tree_starts", "node_positions"):
        assert (getattr(rows, name)[: len(getattr(batch, name))] == getattr(batch, name)).all()
        assert getattr(rows, name).dtype == getattr(batch, name).dtype
    for name in ("slots", "visible_ends", "ancestors"):
        assert (getattr(rows, name)[: batch.num_rows] == getattr(batch, name)).all()
        assert getattr(rows, name).dtype == getattr(batch, name).dtype
    assert not rows.visible_ends[batch.num_rows :].any()
    assert not rows.ancestors[batch.num_rows :].any()


def test_rows_of_logits_and_moves_are_padded_too():
    inputs = sent(forest_of([(6, 5, [-1, 0], 0)]).batch)
    assert inputs.logit_rows.tolist() == [1, 2, 0, 0, 0]
    assert inputs.moves.tolist() == [[3, 4, 5, 9999], [6, 7, 8, 9999]]


def places_of(inputs: DeviceInputs) -> list[tuple[int, torch.Size, tuple[int, ...]]]:
    tensors = [inputs.token_ids, inputs.positions, inputs.logit_rows, *inputs.rows, inputs.moves]
    return [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors]


def test_batches_of_a_shape_lie_at_the_same_places_and_leave_nothing_behind():
    arena = Arena(torch.device("cpu"))
    small, large = forest_of([(5, 3, [], 0), (6, 4, [], 0), (7, 6, [], 0)]), forest_of([(8, 6, [], 0)] * 4)
    first = sent(large.batch, arena=arena)
    places = places_of(first)
    assert row_tier(small.batch.num_rows) == row_tier(large.batch.num_rows) == 8
    second = sent(small.batch, arena=arena)
    assert places_of(second) == places
    assert second.rows.slots[5:].tolist() == [9999] * 3
    assert places_of(sent(large.batch, arena=arena)) == places


def test_a_larger_arena_is_another_generation_and_its_old_places_are_not_used():
    arena = Arena(torch.device("cpu"))
    before = places_of(sent(forest_of([(5, 4, [], 0)]).batch, arena=arena))
    sent(forest_of([(9000, 0, [], 0)], block_size=16).batch, arena=arena)
    assert arena.generation == 1
    after = sent(forest_of([(5, 4, [], 0)]).batch, arena=arena)
    assert places_of(after) != before
    assert after.token_ids.tolist() == [4]
