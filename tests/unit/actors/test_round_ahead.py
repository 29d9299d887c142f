"""The pick of a round sent ahead, against a slow one that walks from the root."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.messages import (
    AheadItem,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    Verdict,
    VerifyAhead,
    VerifyBatch,
    VerifyItem,
    VerifyResult,
)
from actors.round_ahead import foreseen_nodes, pick, tree_behind

TOKENS = 3


@st.composite
def trees(draw, max_nodes: int = 14) -> DraftTree:
    """Siblings have different tokens, and no node is likelier than its parent."""
    parents, tokens, confidence, taken = [], [], [], set()
    for node in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(-1, node - 1))
        token = draw(st.integers(0, TOKENS - 1))
        if (parent, token) in taken:
            break
        taken.add((parent, token))
        parents.append(parent)
        tokens.append(token)
        above = confidence[parent] if parent >= 0 else 1.0
        confidence.append(above * draw(st.sampled_from([0.1, 0.5, 0.9, 1.0])))
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(confidence, np.float32))


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


EMITTED = st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=4)


@given(trees(), EMITTED, st.integers(0, 8), st.sampled_from([0, 0.3]))
def test_what_lies_behind_the_emitted_tokens_is_the_draft(tree, emitted, max_nodes, least):
    root, nodes = foreseen_nodes(tree, np.array(emitted, np.int32), max_nodes, least)
    paths = paths_of(tree)
    if tuple(emitted) not in paths:
        assert root == -1
        assert not len(nodes)
        return
    assert root == paths.index(tuple(emitted))
    behind = [node for node, path in enumerate(paths) if path[: len(emitted)] == tuple(emitted) and node != root]
    likely = [node for node in behind if tree.confidence[node] >= np.float32(least) * tree.confidence[root]]
    assert len(nodes) == min(max_nodes, len(likely))
    assert set(nodes.tolist()) <= set(likely)
    if len(nodes):  # none that is left out is likelier
        rest = [tree.confidence[node] for node in likely if node not in nodes]
        assert min(tree.confidence[nodes]) >= max(rest, default=0.0)
    made = tree_behind(tree, root, nodes)
    assert [(*emitted, *path) for path in paths_of(made)] == [paths[node] for node in nodes]
    assert all(made.confidence <= 1.0)


def item_of(seq_id: int, length: int, tree: DraftTree) -> VerifyItem:
    delta = SequenceDelta(seq_id, length - 1, np.zeros(1, np.int32))
    return VerifyItem(delta, 1, tree, SequenceStart(SamplingParams(0), 3))


def chain(*tokens: int) -> DraftTree:
    return DraftTree.chain(np.array(tokens, np.int32), np.full(len(tokens), 0.9, np.float32))


def ahead_of(tree: DraftTree | None, **changes) -> VerifyAhead:
    items = [AheadItem(1, tree, max_nodes=8, gain=changes.pop("gain", 0.0))]
    return VerifyAhead(8, changes.pop("after", 7), items, **changes)


def test_the_batch_goes_on_after_the_emitted_tokens():
    batch = VerifyBatch(7, [item_of(1, 10, chain(5, 6))])
    verdict = Verdict(seq_id=1, num_computed=10, rows=3, next_token=9, path=np.array([0], np.int32))
    result = VerifyResult(7, [verdict])
    picked = pick(ahead_of(chain(5, 9, 4, 3), finished=[2], num_successors=3), batch, result)
    item = picked.batch.items[0]
    assert (picked.batch.round_id, picked.batch.finished, picked.batch.num_successors) == (8, [2], 3)
    assert (item.delta.seq_id, item.delta.start, item.delta.token_ids.tolist()) == (1, 10, [5, 9])
    assert item.tree.token_ids.tolist() == [4, 3]
    # Not foreseen: no draft.
    assert pick(ahead_of(chain(5, 8)), batch, result).batch.items[0].draft is None
    assert pick(ahead_of(None), batch, result).batch.items[0].draft is None


def test_rounds_are_declined_where_they_do_not_follow_or_would_lose_too_much():
    batch = VerifyBatch(7, [item_of(1, 10, chain(5))])
    verdict = Verdict(seq_id=1, num_computed=10, rows=2, next_token=9, path=np.zeros(0, np.int32))
    result = VerifyResult(7, [verdict])
    assert pick(ahead_of(chain(9, 4)), batch, result) is not None
    assert pick(ahead_of(chain(9, 4), after=6), batch, result) is None
    assert pick(ahead_of(chain(9, 4), finished=[1]), batch, result) is None
    assert pick(ahead_of(chain(8, 4), gain=2.0, most_lost=1.9), batch, result) is None
    assert pick(ahead_of(chain(8, 4), gain=2.0, most_lost=2.0), batch, result) is not None
    unfinished = Verdict(seq_id=1, num_computed=4, rows=2, next_token=-1, path=np.zeros(0, np.int32))
    assert pick(ahead_of(chain(9, 4)), batch, VerifyResult(7, [unfinished])) is None
    wrong = Verdict(seq_id=1, num_computed=10, rows=2, next_token=9, path=np.array([3], np.int32))
    assert pick(ahead_of(chain(9, 4)), batch, VerifyResult(7, [wrong])) is None
