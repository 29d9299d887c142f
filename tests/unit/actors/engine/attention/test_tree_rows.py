"""Flat arrays of a batch say of every row and slot what it may see."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.attention.tree_rows import tree_rows
from actors.engine.batch import PackedBatch
from paceline_testing.forests import forest_of, forests


def arrays_of(batch: PackedBatch, num_rows: int, padding_slot: int) -> SimpleNamespace:
    """`TreeRows` as numpy arrays."""
    rows = tree_rows(batch, num_rows, padding_slot, torch.device("cpu"))
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
    rows = arrays_of(batch, batch.num_rows + 3, padding_slot=9999)
    for index, part in enumerate(forest.parts):
        visible = forest.visible(index, window)
        assert (seen(rows, index, visible.shape[1], window) == visible).all()
        own_blocks = rows.block_tables[index][: len(part.sequence.blocks)]
        assert own_blocks.tolist() == part.sequence.blocks
    assert (rows.slots[batch.num_rows :] == 9999).all()
    assert (rows.slots[: batch.num_rows] == batch.slots).all()
    assert (rows.row_positions[: batch.num_rows] == batch.positions).all()
    assert rows.ancestors.shape[1] in (1, 2, 4)


def test_a_tree_as_large_as_a_word_uses_its_highest_bit():
    parents = [-1, -1, 0, *range(2, 63)]  # the last node sees all but node 1
    rows = arrays_of(forest_of([(6, 5, parents, 0)], block_size=1).batch, 65, 0)
    assert rows.ancestors.shape == (65, 1)
    assert int(rows.ancestors[64, 0]) == -1 - 2


@given(forests(), st.integers(0, 3))
def test_all_arrays_are_those_of_the_batch_and_rows_of_padding_see_nothing(forest, padding):
    batch = forest.batch
    rows = arrays_of(batch, batch.num_rows + padding, 9999)
    for name in ("first_rows", "begins", "tree_starts", "block_tables", "node_positions"):
        assert (getattr(rows, name) == getattr(batch, name)).all()
        assert getattr(rows, name).dtype == getattr(batch, name).dtype
    for name in ("slots", "visible_ends", "ancestors"):
        assert (getattr(rows, name)[: batch.num_rows] == getattr(batch, name)).all()
        assert getattr(rows, name).dtype == getattr(batch, name).dtype
        assert len(getattr(rows, name)) == batch.num_rows + padding
    assert not rows.visible_ends[batch.num_rows :].any()
    assert not rows.ancestors[batch.num_rows :].any()
