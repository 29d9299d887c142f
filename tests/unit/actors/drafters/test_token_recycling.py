"""Token recycling against a plain dictionary, its fixed trees, and the files that describe others."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_tree import depths_of
from actors.drafters.contract import MAX_CONTEXT, DraftContext, VerifiedRows
from actors.drafters.token_recycling import TokenRecyclingDrafter
from actors.errors import InvalidRequest
from actors.messages import SamplingParams

K = 8


def soft_rows(tokens: list[int], successors: list[list[int]], namespace: str = "") -> VerifiedRows:
    contexts = np.full((len(tokens), MAX_CONTEXT), -1, np.int32)
    contexts[:, -1] = tokens
    ids = np.array(successors, np.int32).reshape(len(tokens), -1)
    probs = np.tile(np.linspace(0.5, 0.1, ids.shape[1], dtype=np.float32), (len(tokens), 1))
    return VerifiedRows(namespace, contexts, ids, probs)


def observed(token: int, following: int, namespace: str = "") -> VerifiedRows:
    rows = soft_rows([token], [[following] + [0] * (K - 1)], namespace)
    rows.probs[:] = 0.0
    rows.probs[:, 0] = 1.0
    return rows


def context(token: int, max_nodes: int = 16, namespace: str = "") -> DraftContext:
    return DraftContext(1, np.array([5, token], np.int32), 0, 2, max_nodes, SamplingParams(seed=0), namespace)


def propose(drafter, token: int, max_nodes: int = 16, namespace: str = ""):
    tree = drafter.propose([context(token, max_nodes, namespace)])[0]
    assert tree.is_valid(1000)
    assert len(tree) <= max_nodes
    path = []
    for node, parent in enumerate(tree.parents.tolist()):
        path.append((*(path[parent] if parent >= 0 else ()), int(tree.token_ids[node])))
        if parent >= 0:
            assert tree.confidence[node] <= tree.confidence[parent]
    return tree, path


def test_nothing_is_drafted_after_an_unknown_token():
    drafter = TokenRecyclingDrafter()
    assert len(propose(drafter, 7)[0]) == 0
    drafter.remember(soft_rows([3], [list(range(10, 18))]))
    assert (len(propose(drafter, 900)[0]), len(propose(drafter, 2)[0])) == (0, 0)
    assert len(propose(drafter, 3, 0)[0]) == 0


def test_a_likely_path_is_drawn_before_unlikely_siblings():
    drafter = TokenRecyclingDrafter()
    drafter.remember(soft_rows([1, 2, 3], [[2, *range(20, 27)], [3, *range(30, 37)], [4, *range(40, 47)]]))
    _, paths = propose(drafter, 1, 5)
    assert paths[0] == (2,)
    assert {(2, 3), (20,)} <= set(paths)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.permutations(range(12)), st.booleans()), min_size=1, max_size=30),
    st.integers(0, 9),
    st.integers(1, 24),
)
def test_trees_hold_the_latest_successors_best_first(lessons, root, max_nodes):
    drafter = TokenRecyclingDrafter(floor=0.0)
    known: dict[int, list[int]] = {}
    for token, successors, is_soft in lessons:
        if is_soft:
            drafter.remember(soft_rows([token], [successors[:K]]))
            known[token] = list(successors[:K])
        else:
            drafter.remember(observed(token, successors[0]))
            known[token] = [successors[0], *(one for one in known.get(token, []) if one != successors[0])][:K]
    tree, paths = propose(drafter, root, max_nodes)
    if root not in known:
        assert not paths
        return
    assert len(set(paths)) == len(paths)
    for path in paths:
        before = (root, *path)[-2]
        rank = known[before].index(path[-1])
        assert all((*path[:-1], better) in paths for better in known[before][:rank])
    assert np.all(np.diff(tree.confidence) <= 1e-6)


def test_the_chance_of_a_rank_is_what_was_seen():
    drafter = TokenRecyclingDrafter()
    for _ in range(2000):  # what was likeliest before is so again in three of four rows, and second in the other
        for best, second in ((3, 2), (2, 3), (2, 3), (2, 3)):
            drafter.remember(soft_rows([1], [[2, 3, 4, 5, 6, 7, 8, 9]]))
            drafter.remember(soft_rows([1], [[best, second, 4, 5, 6, 7, 8, 9]]))
    tree, paths = propose(drafter, 1, 8)
    assert tree.confidence[paths.index((2,))] == pytest.approx(0.75, abs=0.02)
    assert tree.confidence[paths.index((3,))] == pytest.approx(0.25, abs=0.02)


# The tree of the authors' code, version 2.2.2, as paths of ranks.
PUBLISHED = """
0 1 2 3 4 5 6 7
00 01 02 03 04 05 06 07 10 11 12 13 20 21 22 30 31 40 50 60 70
000 001 002 003 004 005 006 007 010 011 012 020 021 030 040 050 060 070 100 101 110 200 300 400 500
0000 0001 0002 0003 0004 0010 0011 0020 0030 0040 0100 0200 1000 2000 3000
00000 00001 00002 00010 00020 00100 01000 10000
000000 000001 000100
"""


def test_the_published_tree_has_its_shape():
    drafter = TokenRecyclingDrafter(tree="static-80")
    tokens = list(range(K**5))  # t is followed by K t + 1, ..., K t + K, so each path of ranks has a token of its own
    drafter.remember(soft_rows(tokens, [[K * token + rank + 1 for rank in range(K)] for token in tokens]))
    (tree,) = drafter.propose([context(0, 100)])
    paths = []
    for token in tree.token_ids.tolist():
        path = ""
        while token:
            token, rank = divmod(token - 1, K)
            path = f"{rank}{path}"
        paths.append(path)
    assert sorted(paths) == sorted(PUBLISHED.split())
    assert len(paths) == 80


@pytest.mark.parametrize(("name", "levels"), [("static-80", (8, 21, 25, 15, 8, 3)), ("static-60", (7, 20, 21, 8, 4))])
def test_the_trees_that_come_along_have_their_sizes(name, levels):
    drafter = TokenRecyclingDrafter(tree=name)
    tokens = list(range(100))
    drafter.remember(soft_rows(tokens, [[(7 * token + rank) % 100 for rank in range(K)] for token in tokens]))
    tree, _ = propose(drafter, 1, 100)
    assert np.bincount(depths_of(tree.parents))[1:].tolist() == list(levels)
    assert len(propose(drafter, 1, 10)[0]) == 10


@pytest.mark.parametrize(
    "tree",
    [
        [[1], [0], [0, 2], [0, 2, 0]],
        {"tree_adj": {"0": [1, 9], "1": [2, 3, 4], "4": [5], "9": [], "5": []}},  # as some write them, leaves or not
        {"tree_adj": {"4": [5], "1": [3, 2, 4], "0": [1, 9]}},
    ],
)
def test_a_tree_of_ones_own(tmp_path, tree):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(tree))
    drafter = TokenRecyclingDrafter(tree=str(file))
    drafter.remember(
        soft_rows([1, 2, 22], [[2, 12, *range(50, 56)], [20, 21, 22, *range(60, 65)], [9, *range(70, 77)]])
    )
    wanted = {(2,), (12,), (2, 22), (2, 22, 9)}
    if isinstance(tree, dict):  # every rank below one that is there has a place of its own
        wanted |= {(2, 20), (2, 21)}
    assert set(propose(drafter, 1)[1]) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "[[8]]", "[[-1]]", "[[0, 0]]", "[[]]", '[["0"]]', "[[true]]", "{}", "7", "[[0.0]]", "[0]",
        '{"tree_adj": {}}', '{"tree_adj": 7}',
        '{"tree_adj": {"0": [1, 1]}}', '{"tree_adj": {"0": [1], "1": [0]}}', '{"tree_adj": {"0": [1], "2": [3]}}',
        '{"tree_adj": {"0": ["1"]}}', '{"tree_adj": {"0": 1}}', '{"tree_adj": {"0": [1, 2, 3, 4, 5, 6, 7, 8, 9]}}',
    ],
)  # fmt: skip
def test_a_tree_file_that_makes_no_sense_is_refused(tmp_path, text):
    file = tmp_path / "tree.json"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match="tree"):
        TokenRecyclingDrafter(tree=str(file))


def test_a_tree_that_does_not_exist_is_refused():
    with pytest.raises(InvalidRequest, match=r"static-80.*path"):
        TokenRecyclingDrafter(tree="no-such")


def test_namespaces_share_nothing_and_are_bounded():
    drafter = TokenRecyclingDrafter(max_namespaces=2)
    drafter.remember(soft_rows([1], [list(range(10, 18))], "a"))
    assert len(propose(drafter, 1, namespace="b")[0]) == 0
    size = drafter.memory_bytes()
    for name in "bcdef":
        drafter.remember(soft_rows([1], [list(range(10, 18))], name))
    assert (drafter.memory_bytes(), len(propose(drafter, 1, namespace="a")[0])) == (2 * size, 0)
    assert len(propose(drafter, 1, namespace="f")[0]) > 0


def test_vocabularies_beyond_two_bytes():
    drafter = TokenRecyclingDrafter()
    drafter.remember(soft_rows([151_900], [[70_000, *range(128_000, 128_007)]]))
    tree = drafter.propose([context(151_900)])[0]
    assert tree.token_ids[0] == 70_000
    assert tree.is_valid(152_000)
