"""Drafts end where one more forward would not pay, whatever the draft model is worth and costs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from cluster.router.draft_depth import DraftDepth, judge, num_levels
from paceline_testing.drafting import paths_of

FORWARD_S = 1.0  # of the target
MOST = 12


def chain(confidence: list[float]) -> DraftTree:
    return DraftTree.chain(np.arange(len(confidence), dtype=np.int32), np.array(confidence, np.float32))


@st.composite
def trees(draw) -> DraftTree:
    parents: list[int] = []
    tokens: list[int] = []
    for _ in range(draw(st.integers(0, 12))):
        node = draw(st.tuples(st.integers(-1, len(parents) - 1), st.integers(0, 3)))
        if node not in zip(parents, tokens, strict=True):  # siblings are distinct
            parents.append(node[0])
            tokens.append(node[1])
    confidence = np.full(len(parents), 0.5, np.float32)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), confidence)


@given(trees(), st.lists(st.integers(0, 3), max_size=6))
def test_nodes_are_judged_by_their_paths(tree, emitted):
    wanted = []
    for path in paths_of(tree):
        length = min(len(path), len(emitted))
        is_begun_right = list(path[:length]) == emitted[:length]
        wanted.append(len(path) <= len(emitted) or None if is_begun_right else False)
    is_right, levels = judge(tree, np.array(emitted, np.int32))
    assert [{1: True, 0: False, -1: None}[right] for right in is_right.tolist()] == wanted
    assert levels == num_levels(tree)
    assert num_levels(tree) == max(map(len, paths_of(tree)), default=0)


def test_what_costs_nothing_is_drafted_to_the_end_and_what_never_pays_is_not():
    depth = DraftDepth()
    assert depth.min_confidence(100.0, 1, 0.0) == 0.0  # before the first answer nothing is known to cost time
    depth.observe_answer(0.01, 2)
    assert depth.level_s == pytest.approx(0.005)
    depth.observe_answer(1.0, 0)  # a prompt alone
    assert depth.level_s == pytest.approx(0.005)
    assert depth.min_confidence(1e6, 1, 0.0) == 1.0
    assert 0.0 < depth.min_confidence(50.0, 1, 0.0) < depth.min_confidence(100.0, 1, 0.0) < 1.0
    assert depth.min_confidence(100.0, 8, 0.0) < depth.min_confidence(100.0, 1, 0.0)  # a forward serves all eight
    assert depth.min_confidence(50.0, 1, 0.2) > depth.min_confidence(50.0, 1, 0.0)


def test_a_parallel_model_is_asked_for_all_that_the_target_has_rows_for():
    depth = DraftDepth()
    depth.observe_answer(0.01, 4, is_parallel=True)
    assert depth.min_confidence(1e6, 1, 0.0) == 0.0
    assert 0.0 < depth.min_confidence(1e6, 1, 0.1) < depth.min_confidence(1e6, 1, 0.3)


@pytest.mark.parametrize("parents", [[1, -1], [-2, 0], [0, -1]])
@pytest.mark.parametrize("confidence", [[0.5, 0.5], [float("nan"), 0.5]])
def test_broken_trees_and_times_teach_nothing(parents, confidence):
    depth = DraftDepth()
    depth.observe_answer(0.01, 2)
    before = depth.min_confidence(50.0, 1, 0.0)
    broken = DraftTree(np.array([1, 2], np.int32), np.array(parents, np.int32), np.array(confidence, np.float32))
    assert num_levels(broken) == 0
    for _ in range(20):
        depth.observe_tree(broken, np.array([1, 2], np.int32))
        depth.observe_tree(chain([float("nan")]), np.array([0], np.int32))
        for elapsed_s in (float("nan"), float("inf"), -1.0):
            depth.observe_answer(elapsed_s, 2)
    assert depth.min_confidence(50.0, 1, 0.0) == before


def test_confidence_that_promises_too_much_is_seen_through():
    honest, boastful = DraftDepth(), DraftDepth()
    for number in range(400):
        tree = chain([0.6])
        honest.observe_tree(tree, np.array([0 if number % 5 < 3 else 9], np.int32))
        boastful.observe_tree(tree, np.array([0 if number % 5 < 1 else 9], np.int32))
    for depth in (honest, boastful):
        depth.observe_answer(0.1, 1)
    assert boastful.min_confidence(1.5, 1, 0.0) > 0.6 > honest.min_confidence(1.5, 1, 0.0)


def test_levels_by_value_are_within_their_limits():
    depth = DraftDepth()
    assert depth.paying_levels(100.0, 1, 0.0, most=8) == 8  # before the first answer nothing is known to cost time
    depth.observe_answer(0.01, 2)
    assert depth.paying_levels(1e6, 1, 0.0, most=8) == 1
    assert 1 < depth.paying_levels(50.0, 1, 0.0, most=8) < depth.paying_levels(50.0, 2, 0.0, most=8) < 8
    assert depth.paying_levels(50.0, 1, 0.2, most=8) < depth.paying_levels(50.0, 1, 0.0, most=8)


def speed(share: float, cost_s: float, fixed: int | None, rounds: int = 600, is_rejection: bool = False) -> float:
    """Tokens a second where each draft token is right with probability `share` after a right one. The draft model says
    sharpened probabilities: it is right in what it is sure of, and its confidence varies from place to place."""
    rng, depth = np.random.default_rng(1), DraftDepth()
    tokens, seconds = 0.0, 0.0
    for _ in range(rounds):
        odds = rng.beta(8 * share, 8 * (1 - share), MOST)
        path = np.cumprod(odds)
        costs = tokens / max(seconds, 1e-9), 1, 0.005
        least = 0.0 if fixed else depth.min_confidence(*costs)
        most = fixed or next((d for d in range(1, MOST) if path[d - 1] < least), MOST)
        if is_rejection:
            most = depth.paying_levels(*costs, most=MOST)
        right = rng.random(MOST) < odds
        accepted = int(np.argmin(right[:most])) if not right[:most].all() else most
        emitted = np.arange(accepted + 1, dtype=np.int32)
        emitted[-1] = 99
        spent = FORWARD_S * (1 + 0.005 * most) + cost_s * most
        tokens, seconds = tokens + accepted + 1, seconds + spent
        if fixed is None:
            depth.observe_tree(chain(path[:most].tolist()), emitted)
            depth.observe_answer(cost_s * most, most)
    return tokens / seconds


@pytest.mark.parametrize("cost", [0.02, 0.2])
@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_depth_by_value_is_as_fast_as_the_best_fixed_depth(share, cost):
    best = max(speed(share, cost, fixed) for fixed in (1, 2, 3, 4, 6, 8, MOST))
    assert speed(share, cost, None) > 0.97 * best
    assert speed(share, cost, None, is_rejection=True) > 0.97 * best
