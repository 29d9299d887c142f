"""Passes over the draft trees of many sequences do what is done for one tree after the other."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.draft_tree import DraftTree, depths_of
from actors.engine.draft_trees import logit_places, offsets_of, valid_trees
from actors.sampling.verification import walk_tree, walk_trees

VOCAB = 5
TREES = st.lists(
    st.integers(0, 9).flatmap(
        lambda count: st.tuples(
            st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count),
            st.tuples(*(st.integers(-1, node - 1) for node in range(count))),
        )
    ),
    max_size=5,
)
ODD = {
    "a token below the vocabulary": lambda tree: replace(tree, token_ids=tree.token_ids - 5),
    "a token beyond the vocabulary": lambda tree: replace(tree, token_ids=tree.token_ids + 1),
    "a parent that comes later": lambda tree: replace(tree, parents=tree.parents[::-1].copy()),
    "a parent before the root": lambda tree: replace(tree, parents=tree.parents - 1),
    "the same token twice": lambda tree: replace(tree, token_ids=tree.token_ids * 0 + 4, parents=tree.parents * 0 - 1),
    "more confidence than certainty": lambda tree: replace(tree, confidence=tree.confidence + np.float32(1.0)),
    "no confidence": lambda tree: replace(tree, confidence=tree.confidence * np.float32(np.nan)),
    "fewer parents": lambda tree: replace(tree, parents=tree.parents[1:]),
    "fewer confidences": lambda tree: replace(tree, confidence=tree.confidence[1:]),
    "parents that are no integers": lambda tree: replace(tree, parents=tree.parents.astype(np.float32)),
    "tokens that are no integers": lambda tree: replace(tree, token_ids=tree.token_ids.astype(np.float32)),
    "wider integers": lambda tree: replace(tree, token_ids=tree.token_ids.astype(np.int64)),
    "a required node without its parent": lambda tree: replace(tree, required=np.array([False, True])),
    "a read-only array": lambda tree: replace(tree, token_ids=np.frombuffer(tree.token_ids.tobytes(), np.int32)),
    "an unaligned array": lambda tree: replace(
        tree, parents=np.frombuffer(memoryview(b"\0" + tree.parents.tobytes())[1:], np.int32)
    ),
}


def tree_of(tokens: list[int], parents: tuple[int, ...]) -> DraftTree:
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.full(len(tokens), 0.5, np.float32))


def joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([*arrays, np.empty(0, np.int32)], dtype=np.int32)


@given(TREES)
def test_trees_are_as_valid_together_as_each_is_alone(shapes):
    trees = [tree_of(*shape) for shape in shapes]
    are_valid, together = valid_trees(trees, VOCAB)
    assert are_valid == [tree.is_valid(VOCAB) for tree in trees]
    assert (together is not None) == all(are_valid)
    if together is not None:
        assert together.tokens.tolist() == [token for tokens, _ in shapes for token in tokens]
        assert together.parents.tolist() == [parent for _, parents in shapes for parent in parents]
        assert np.diff(together.offsets).tolist() == [len(tokens) for tokens, _ in shapes]


@pytest.mark.parametrize("name", ODD)
def test_an_odd_tree_is_judged_as_alone_and_changes_nothing_for_the_others(name):
    plain = tree_of([3, 4], (-1, 0))
    trees = [plain, ODD[name](plain), DraftTree.empty(), tree_of([1, 1], (-1, -1))]
    found, together = valid_trees(trees, VOCAB)
    assert together is None
    assert found == [True, trees[1].is_valid(VOCAB), True, False]
    assert found[1] == name.startswith(("wider", "a read-only", "an unaligned"))


@given(TREES, st.data())
def test_rows_of_logits_produce_the_tokens_behind_their_nodes(shapes, data):
    parents = [np.array(parents, np.int32) for _, parents in shapes]
    lengths = [data.draw(st.integers(1, 99)) for _ in shapes]
    trees, positions = logit_places(
        joined(parents), offsets_of([len(part) for part in parents]), np.array(lengths, np.int64)
    )
    rows = [
        (tree, length + depth)
        for tree, (part, length) in enumerate(zip(parents, lengths, strict=True))
        for depth in [0, *depths_of(part).tolist()]
    ]
    assert list(zip(trees.tolist(), positions.tolist(), strict=True)) == rows


def walked(drawn: list[int], tokens: list[int], parents: tuple[int, ...]) -> tuple[list[int], int]:
    """The walk, by looking for the child at every step."""
    path: list[int] = []
    node = -1
    while True:
        wanted = drawn[node + 1]
        children = [n for n, parent in enumerate(parents) if parent == node and tokens[n] == wanted]
        if not children:
            return path, wanted
        node = children[0]
        path.append(node)


def distinct(shapes: list[tuple[list[int], tuple[int, ...]]]) -> list[tuple[list[int], tuple[int, ...]]]:
    """Without the trees in which siblings have the same token."""
    return [shape for shape in shapes if tree_of(*shape).is_valid(VOCAB)]


@given(TREES.map(distinct), st.data())
def test_trees_are_walked_together_as_each_is_alone(shapes, data):
    drawn = [[data.draw(st.integers(0, VOCAB - 1)) for _ in range(1 + len(tokens))] for tokens, _ in shapes]
    wanted = [walked(row, *shape) for row, shape in zip(drawn, shapes, strict=True)]
    nodes, ends, next_tokens = walk_trees(
        np.array([token for row in drawn for token in row], np.int64),
        joined([np.array(tokens, np.int32) for tokens, _ in shapes]),
        joined([np.array(parents, np.int32) for _, parents in shapes]),
        offsets_of([len(tokens) for tokens, _ in shapes]),
    )
    paths = [nodes[begin:end].tolist() for begin, end in pairwise(ends)]
    assert list(zip(paths, next_tokens.tolist(), strict=True)) == wanted
    assert nodes.dtype == np.int32
    for row, (tokens, parents), (path, next_token) in zip(drawn, shapes, wanted, strict=True):
        alone = walk_tree(np.array(row), np.array(tokens, np.int32), np.array(parents, np.int32))
        assert (alone[0].tolist(), alone[1]) == (path, next_token)
