"""The suffix drafter against brute force, and its branches."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.drafters import suffix as suffix_drafter
from actors.drafters.contract import DraftContext
from actors.drafters.registry import create_drafter
from actors.drafters.suffix import SuffixDrafter
from actors.messages import SamplingParams


def draft(tokens: list[int], max_nodes: int = 16, floor: float = 0.0, **options: Any) -> DraftTree:
    context = DraftContext(1, np.array(tokens, np.int32), 0, len(tokens), max_nodes, SamplingParams(seed=1))
    (tree,) = SuffixDrafter(floor=floor, **options).propose([context])
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
@settings(max_examples=200)
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
    assert (paths[0][:3], paths[1][:2]) == ([5, 6, 51], [3, 4])


def test_a_shorter_suffix_adds_what_it_was_followed_by_last() -> None:
    tokens = [1, 2, 3, 4, 8, 2, 7, 7, 9, 1, 2]
    paths = branches(draft(tokens))
    assert (paths[0][:2], paths[1], len(paths)) == ([3, 4], [7, 7][: len(paths[1])], 2)


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


def continuations_of(tokens: list[int]) -> tuple[list[int], Counter[int]]:
    """The longest suffix that occurred earlier, and how often each token followed it."""
    lengths = [n for n in range(1, len(tokens)) if followed_by(tokens, tokens[-n:])]
    suffix = tokens[-max(lengths) :] if lengths else []
    ends = range(len(suffix), len(tokens)) if suffix else ()
    return suffix, Counter(tokens[end] for end in ends if tokens[end - len(suffix) : end] == suffix)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=14), st.integers(1, 6))
@settings(max_examples=300)
def test_by_frequency_the_most_frequent_continuations_come_first_with_their_share(
    tokens: list[int], top_k: int
) -> None:
    with patch.object(suffix_drafter, "_ACCEPTANCE", np.full(1, 0.5, np.float32)):
        tree = draft(tokens, max_nodes=64, top_k=top_k, by_frequency=True)
    suffix, counts = continuations_of(tokens)
    roots = np.flatnonzero(tree.parents < 0)
    assert len(roots) <= top_k
    if not suffix:
        assert len(tree) == 0
        return
    found = {int(tree.token_ids[node]): float(tree.confidence[node]) for node in roots}
    shares = {token: 0.5 * count / counts.total() for token, count in counts.items()}
    wanted = sorted(shares.values(), reverse=True)[: max(top_k - 1, min(top_k, 2))]
    assert sorted((found[token] for token in found if token in counts), reverse=True) == pytest.approx(wanted)
    for token in found.keys() & counts.keys():
        assert found[token] == pytest.approx(shares[token])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 6))
@settings(max_examples=200)
def test_top_k_bounds_the_branches_and_the_last_continuations_are_among_them(tokens: list[int], top_k: int) -> None:
    firsts = [path[0] for path in branches(draft(tokens, max_nodes=64, top_k=top_k))]
    suffix, counts = continuations_of(tokens)
    if suffix:
        wanted = followed_by(tokens, suffix)[: max(top_k - 1, min(top_k, 2))]
        assert set(wanted) <= set(firsts)
    assert len(set(firsts)) == len(firsts) <= top_k
    assert len(set(firsts) - set(counts)) <= 1  # of a shorter suffix


def test_a_rare_last_continuation_comes_second_by_frequency() -> None:
    tokens = [*[1, 2, 7, 50] * 3, 1, 2, 8, 51, 1, 2]
    assert [path[0] for path in branches(draft(tokens))][:2] == [8, 7]
    assert [path[0] for path in branches(draft(tokens, by_frequency=True))][:2] == [7, 8]


def test_knobs_bound_what_a_match_drafts() -> None:
    def nodes(length: int, **options: float) -> int:
        text = list(range(100))
        tokens = np.array([*text, 200, *text[20 : 20 + length]], np.int32)
        drafter = create_drafter("suffix", floor=0.0, **options)
        (tree,) = drafter.propose([DraftContext(1, tokens, 0, len(tokens), 40, SamplingParams(seed=1))])
        return len(tree)

    assert nodes(3) == 40
    assert nodes(3, n_predicts=5) == 5
    assert nodes(3, alpha=2.5) == 8
    assert nodes(3, alpha=2.5, len_bias=1) == 6
    assert nodes(3, alpha=0) == 1
    assert [nodes(length, len_threshold=5, len_bias=2) for length in (6, 7)] == [0, 40]


def test_a_bias_makes_a_match_as_sure_as_a_shorter_one() -> None:
    tokens = [1, 2, 3, 4, 50, 1, 2, 3]
    assert draft(tokens, len_bias=1).confidence[0] == draft([0, *tokens[1:5], 2, 3]).confidence[0]
    assert draft(tokens, len_bias=1).confidence[0] < draft(tokens).confidence[0]
