"""The suffix drafter against brute force, and its branches."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.drafters.contract import DraftContext
from actors.drafters.suffix import SuffixDrafter
from actors.messages import SamplingParams


def draft(tokens: list[int], max_nodes: int = 16, floor: float = 0.0) -> DraftTree:
    context = DraftContext(1, np.array(tokens, np.int32), 0, len(tokens), max_nodes, SamplingParams(seed=1))
    (tree,) = SuffixDrafter(floor=floor).propose([context])
    return tree


def branches(tree: DraftTree) -> list[list[int]]:
    """Every path from the root, surest first token first."""
    paths = []
    for root in np.flatnonzero(tree.parents < 0):
        path, node = [], int(root)
        while True:
            path.append(int(tree.token_ids[node]))
            children = np.flatnonzero(tree.parents == node)
            if not children.size:
                break
            node = int(children[0])
        paths.append(path)
    return paths


def followed_by(tokens: list[int], suffix: list[int]) -> list[int]:
    """Tokens that followed a suffix, most recent first, each once."""
    length = len(suffix)
    ends = [end for end in range(len(tokens) - 1, length - 1, -1) if tokens[end - length : end] == suffix]
    return list(dict.fromkeys(tokens[end] for end in ends))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
@settings(max_examples=200, deadline=None)
def test_the_first_branch_follows_the_longest_match_and_the_others_were_seen_too(tokens: list[int]) -> None:
    lengths = [n for n in range(1, len(tokens)) if followed_by(tokens, tokens[-n:])]
    paths = branches(draft(tokens))
    if not lengths:
        assert paths == []
        return
    longest = followed_by(tokens, tokens[-max(lengths) :])
    assert paths[0][0] == longest[0]
    firsts = [path[0] for path in paths]
    assert len(set(firsts)) == len(firsts) <= 3
    assert set(firsts) <= set(followed_by(tokens, tokens[-1:]))
    if len(longest) > 1:
        assert longest[1] in firsts


def test_the_most_recent_continuation_comes_first_and_an_older_one_second() -> None:
    tokens = [1, 2, 3, 4, 50, 1, 2, 5, 6, 51, 1, 2]
    paths = branches(draft(tokens))
    assert paths[0][:3] == [5, 6, 51]
    assert paths[1][:2] == [3, 4]


def test_a_shorter_suffix_adds_what_it_was_followed_by_last() -> None:
    tokens = [1, 2, 3, 4, 8, 2, 7, 7, 9, 1, 2]
    paths = branches(draft(tokens))
    assert paths[0][:2] == [3, 4]
    assert paths[1] == [7, 7][: len(paths[1])]
    assert len(paths) == 2


def test_few_nodes_go_to_the_surest_branch() -> None:
    tokens = [1, 2, 3, 4, 8, 2, 7, 7, 9, 1, 2]
    assert draft(tokens, max_nodes=1).token_ids.tolist() == [3]
    tree = draft(tokens, max_nodes=5)
    everything = draft(tokens, max_nodes=40)
    assert tree.confidence.min() >= np.sort(everything.confidence)[::-1][4]


def test_the_length_of_a_draft_grows_with_the_length_of_the_match() -> None:
    rng = np.random.default_rng(1)
    text = rng.permutation(100).tolist()
    lengths = [len(draft([*text, 200, *text[20 : 20 + n]], max_nodes=64, floor=0.1)) for n in (1, 2, 4, 12)]
    assert lengths == sorted(set(lengths))
    assert lengths[0] <= 4


def test_nodes_below_the_floor_are_left_out() -> None:
    tree = draft([1, 2, 3, 4, 8, 2, 7, 7, 9, 1, 2], max_nodes=64, floor=0.15)
    assert len(tree)
    assert tree.confidence.min() >= np.float32(0.15)
