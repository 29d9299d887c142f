"""Rounds that no router sends ahead."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.engine.ahead_check import is_well_formed
from actors.messages import AheadItem, VerifyAhead

VOCAB = 5
NODES = st.tuples(st.integers(0, VOCAB), st.integers(-2, 3), st.sampled_from([0.0, 0.5, 0.5, 1.0]))


def tree_of(nodes: list[tuple[int, int, float]]) -> DraftTree:
    tokens, parents, confidence = zip(*nodes, strict=True) if nodes else ((), (), ())
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(confidence, np.float32))


@given(st.lists(st.tuples(st.integers(1, 9), st.none() | st.lists(NODES, max_size=4)), max_size=3))
def test_a_round_is_well_formed_as_a_search_says(sent):
    items = [AheadItem(seq_id, None if nodes is None else tree_of(nodes), 4) for seq_id, nodes in sent]
    trees = [item.tree for item in items if item.tree is not None]
    falls = all(
        parent < 0 or confidence <= tree.confidence[parent]
        for tree in trees
        if tree.is_valid(VOCAB)
        for parent, confidence in zip(tree.parents.tolist(), tree.confidence, strict=True)
    )
    expected = falls and all(tree.is_valid(VOCAB) for tree in trees) and len({one for one, _ in sent}) == len(sent)
    assert is_well_formed(VerifyAhead(8, 7, items), VOCAB) == expected
