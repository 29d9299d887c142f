"""The draft tree: its invariants, its parts, and its way over the wire."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.draft_tree import DraftTree, TopProbs, depths_of
from actors.messages import DraftResult, SequenceDelta, VerifyItem, decode_message, encode_message, no_tokens

VOCAB = 8


def tree(token_ids: list[int], parents: list[int], required: list[bool] | None = None) -> DraftTree:
    confidence = np.linspace(0.9, 0.1, len(token_ids), dtype=np.float32)
    flags = None if required is None else np.array(required)
    return DraftTree(np.array(token_ids, np.int32), np.array(parents, np.int32), confidence, required=flags)


#   +- 1 - 2 - 3
#   +- 4 - 2
FORKED = tree([1, 4, 2, 2, 3], [-1, -1, 0, 1, 2])


def test_a_tree_with_parents_first_and_distinct_siblings_is_valid_and_so_is_an_empty_one():
    assert FORKED.is_valid(VOCAB)
    assert FORKED
    assert not DraftTree.empty()
    assert DraftTree.empty().is_valid(VOCAB)
    assert tree([1, 4, 2], [-1, 0, 1], [True, True, False]).is_valid(VOCAB)


@pytest.mark.parametrize(
    "broken",
    [
        tree([VOCAB], [-1]),
        tree([-1], [-1]),
        tree([1, 2], [-1, 1]),
        tree([1, 2], [-1, -2]),
        tree([1, 2, 2], [-1, 0, 0]),
        tree([1, 2], [-1, 0], [False, True]),
        replace(FORKED, confidence=FORKED.confidence[:-1]),
        replace(FORKED, confidence=FORKED.confidence * np.float32(np.nan)),
        replace(FORKED, confidence=FORKED.confidence + 1),
        replace(FORKED, parents=FORKED.parents.astype(np.float32)),
        replace(FORKED, required=np.zeros(2, np.bool_)),
    ],
)
def test_a_tree_that_breaks_an_invariant_is_invalid(broken: DraftTree):
    assert not broken.is_valid(VOCAB)


@given(st.integers(0, 7), st.booleans())
def test_the_first_nodes_are_a_tree_with_their_own_distributions(count: int, has_probs: bool):
    probs = TopProbs(np.arange(10, dtype=np.int32), np.full(10, 0.5, np.float32), 2) if has_probs else None
    first = replace(FORKED, probs=probs).first(count)
    kept = min(count, 5)
    assert first.is_valid(VOCAB)
    assert (len(first), first.token_ids.tolist()) == (kept, FORKED.token_ids[:kept].tolist())
    assert first.probs is None or (len(first.probs.token_ids), first.probs.k) == (2 * kept, 2)


def test_children_of_the_root_have_depth_one():
    assert depths_of(FORKED.parents).tolist() == [1, 1, 2, 2, 3]


def test_it_crosses_the_wire_as_it_is_but_for_required_nodes():
    sent = replace(FORKED, probs=TopProbs(np.array([1], np.int32), np.array([1.0], np.float32), 1))
    received = decode_message(encode_message(DraftResult(1, [7], [sent])))
    assert isinstance(received, DraftResult)
    for name in ("token_ids", "parents", "confidence"):
        assert getattr(received.trees[0], name).tolist() == getattr(sent, name).tolist()
    assert received.trees[0].probs is not None
    assert received.trees[0].probs.k == 1
    with pytest.raises(TypeError, match="only 1-D int32 and float32 arrays"):
        encode_message(DraftResult(1, [7], [tree([1], [-1], [True])]))


def test_an_item_without_drafts_has_an_empty_tree():
    delta = SequenceDelta(1, 0, no_tokens())
    assert len(VerifyItem(delta, 1).tree) == 0
    assert VerifyItem(delta, 1, FORKED).tree is FORKED
