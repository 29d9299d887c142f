"""The arrays of a batch, and what backends derive from them, against plain loops over random forests."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.attention.padded import _PADDING_FOR_A_CALL, group_sequences, place_rows
from actors.engine.attention.visibility import hidden_slots, visible_slots
from actors.engine.batch import num_words
from paceline_testing.forests import Forest, forest_of, slot_positions
from paceline_testing.random_forests import forests

WINDOWS = st.sampled_from([None, 1, 2, 7, 40, -1, -6, -30])  # -n: chunks of n
ALONE = {  # a lone row in a context of 9 slots
    "a committed token": (9, 8, [], 0),
    "the end of a chain": (6, 6, [-1, 0, 1], 2),
    "a node with a wrong sibling": (6, 6, [-1, -1, 1], 2),
}


def physical(forest: Forest, index: int) -> np.ndarray:
    """int64 [context]: slots of a sequence, from its blocks."""
    part = forest.parts[index]
    context = part.sequence.num_computed + part.count + len(part.tree_parents)
    return np.array([
        part.sequence.blocks[slot // forest.block_size] * forest.block_size + slot % forest.block_size
        for slot in range(context)
    ])  # fmt: skip


@given(forests(max_sequences=4, max_nodes=70))
def test_rows_are_the_uncomputed_tokens_and_nodes_of_each_sequence_in_order(forest):
    batch = forest.batch
    tokens, positions, slots = [], [], []
    for index, part in enumerate(forest.parts):
        sequence = part.sequence
        known = sequence.num_computed + part.count
        begin = sequence.num_computed + part.first_node
        context = known + len(part.tree_parents)
        assert batch.begins[index] == begin
        assert batch.contexts[index] == context
        assert batch.first_rows[index] == len(tokens)
        is_chain = part.tree_parents.tolist() == list(range(-1, len(part.tree_parents) - 1))
        assert batch.tree_starts[index] == (context if is_chain else known)
        tokens += [*sequence.tokens[sequence.num_computed : known], *part.tree_tokens[part.first_node :]]
        positions += slot_positions(part)[begin:].tolist()
        slots += physical(forest, index)[begin:].tolist()
        assert sequence.slots(begin, context).tolist() == physical(forest, index)[begin:].tolist()
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.max_context == batch.contexts.max()
    assert batch.num_rows == batch.first_rows[-1] == len(tokens)
    dtypes = {name: getattr(batch, name).dtype for name in batch._fields if name not in ("block_size", "max_context")}
    wide = {"token_ids", "positions", "slots", "ancestors"}
    assert dtypes == {name: np.int64 if name in wide else np.int32 for name in dtypes}


@given(forests(max_sequences=4, max_nodes=70), WINDOWS, st.data())
def test_a_padded_mask_hides_what_a_row_may_not_see(forest, window, data):
    count = len(forest.parts)
    chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True))
    rows = max(forest.parts[index].num_rows for index in chosen)
    slots = int(forest.batch.contexts[chosen].max())
    allowed = np.zeros((len(chosen), rows, slots), bool)
    allowed[:, :, 0] = True
    for place, index in enumerate(chosen):
        visible = forest.visible(index, window)
        allowed[place, : visible.shape[0]] = False
        allowed[place, : visible.shape[0], : visible.shape[1]] = visible
    hidden = hidden_slots(forest.batch, np.array(chosen), rows, slots, window)
    if allowed.all():
        assert hidden is None
    else:
        assert hidden is not None
        assert (hidden == ~allowed).all()


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("window", [None, 8, 9])
def test_a_lone_row_needs_a_mask_only_if_something_is_hidden_from_it(name, window):
    forest = forest_of([ALONE[name]])
    hidden = hidden_slots(forest.batch, np.array([0]), 1, 9, window)
    assert (hidden is None) == (name != "a node with a wrong sibling" and window != 8)


@given(forests(max_sequences=4, max_nodes=70), WINDOWS, st.data())
def test_contexts_of_rows_are_their_visible_slots_in_order(forest, window, data):
    first = data.draw(st.integers(0, forest.batch.num_rows - 1))
    last = data.draw(st.integers(first + 1, forest.batch.num_rows))
    wanted = [
        physical(forest, index)[row].tolist()
        for index in range(len(forest.parts))
        for row in forest.visible(index, window)
    ]
    slots, starts = visible_slots(forest.batch, first, last, window)
    found = [slots[begin:end].tolist() for begin, end in pairwise(starts)]
    assert found == wanted[first:last]


@given(forests(max_sequences=4), st.data())
def test_rows_of_groups_come_back(forest, data):
    batch = forest.batch
    chosen = np.array(data.draw(st.permutations(range(len(forest.parts)))))
    counts = np.diff(batch.first_rows)
    rows = int(counts.max())
    places = np.zeros(batch.num_rows, np.int64)
    packed = place_rows(batch.first_rows, chosen, rows, 5, places).reshape(len(chosen), rows)
    for place, index in enumerate(chosen):
        assert packed[place, : counts[index]].tolist() == list(range(*batch.first_rows[index : index + 2]))
        assert not packed[place, counts[index] :].any()
    assert (packed.reshape(-1)[places - 5] == np.arange(batch.num_rows)).all()


def test_sequences_share_a_call_only_if_padding_costs_less():
    contexts = np.array([100, 100 + _PADDING_FOR_A_CALL // 2, 90, 20])
    assert group_sequences(np.array([1, 2, 65, 3]), contexts) == [[2], [1, 0, 3]]
    contexts[1] += 1
    assert group_sequences(np.array([1, 2, 65, 3]), contexts) == [[2], [1], [0, 3]]


def test_words_of_ancestor_bits_are_as_many_as_a_power_of_two():
    assert [num_words(nodes) for nodes in (0, 1, 64, 65, 128, 129, 256)] == [1, 1, 1, 2, 2, 4, 4]
