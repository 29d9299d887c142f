"""Drafts end where one more forward would not pay, whatever the draft model is worth and costs."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.draft_worth import pays
from actors.eagle.device_growth import level_tier
from cluster.router.draft_depth import DraftCosts, DraftDepth, judge
from paceline_testing.drafting import paths_of

FORWARD_S = 1.0  # of the target
ROW_SHARE = 0.005  # of it that a row more takes
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
    assert levels == max(map(len, paths_of(tree)), default=0)


def test_what_costs_nothing_is_drafted_to_the_end_and_what_never_pays_is_not():
    depth = DraftDepth()
    assert pays(depth.worth(DraftCosts(5.0, 0.0, FORWARD_S)), [0.8])  # a first guess of what a forward takes
    assert not pays(depth.worth(DraftCosts(9.0, 0.0, FORWARD_S)), [0.8])
    depth.observe_answer(0.01, 2)
    assert depth.level_s == pytest.approx(0.005)
    depth.observe_answer(1.0, 0)  # a prompt alone
    assert depth.level_s == pytest.approx(0.005)
    assert not pays(depth.worth(DraftCosts(1e6, 0.0, FORWARD_S)), [1.0])
    dear, cheap = depth.worth(DraftCosts(100.0, 0.0, FORWARD_S)), depth.worth(DraftCosts(50.0, 0.0, FORWARD_S))
    assert pays(cheap, [0.5])
    assert not pays(dear, [0.5])
    assert pays(dear, [0.5, 0.5])  # a forward serves both
    assert not pays(depth.worth(DraftCosts(50.0, 0.2, FORWARD_S)), [0.5])
    assert depth.min_confidence(0.0) == 0.0
    assert 0.0 < depth.min_confidence(0.1) < depth.min_confidence(0.3) < 1.0


def test_a_parallel_model_is_asked_for_all_that_the_target_has_rows_for():
    depth = DraftDepth()
    depth.observe_answer(0.01, 4, is_parallel=True)
    assert pays(depth.worth(DraftCosts(1e6, 0.0, FORWARD_S)), [0.0])


@pytest.mark.parametrize("parents", [[1, -1], [-2, 0], [0, -1]])
@pytest.mark.parametrize("confidence", [[0.5, 0.5], [float("nan"), 0.5]])
def test_broken_trees_and_times_teach_nothing(parents, confidence):
    depth = DraftDepth()
    depth.observe_answer(0.01, 2)
    before = depth.worth(DraftCosts(50.0, 0.0, FORWARD_S)).tolist()
    broken = DraftTree(np.array([1, 2], np.int32), np.array(parents, np.int32), np.array(confidence, np.float32))
    assert judge(broken, np.array([1, 2], np.int32))[1] == 0
    for _ in range(20):
        depth.observe_tree(broken, np.array([1, 2], np.int32))
        depth.observe_tree(chain([float("nan")]), np.array([0], np.int32))
        for elapsed_s in (float("nan"), float("inf"), -1.0):
            depth.observe_answer(elapsed_s, 2)
    assert depth.worth(DraftCosts(50.0, 0.0, FORWARD_S)).tolist() == before


def test_confidence_that_promises_too_much_is_seen_through():
    honest, boastful = DraftDepth(), DraftDepth()
    for number in range(400):
        tree = chain([0.6])
        honest.observe_tree(tree, np.array([0 if number % 5 < 3 else 9], np.int32))
        boastful.observe_tree(tree, np.array([0 if number % 5 < 1 else 9], np.int32))
    for depth in (honest, boastful):
        depth.observe_answer(0.1, 1)
    assert pays(honest.worth(DraftCosts(1.5, 0.0, FORWARD_S)), [0.6])
    assert not pays(boastful.worth(DraftCosts(1.5, 0.0, FORWARD_S)), [0.6])


def test_levels_by_value_are_within_their_limits():
    depth = DraftDepth()
    assert (
        depth.paying_levels(DraftCosts(100.0, 0.0, FORWARD_S), 1, most=8) == 1
    )  # a first guess of what a forward takes
    free = DraftDepth()
    free.observe_answer(0.0, 2)
    assert free.paying_levels(DraftCosts(1e6, 0.0, FORWARD_S), 1, most=8) == 8
    depth.observe_answer(0.01, 2)
    assert depth.paying_levels(DraftCosts(1e6, 0.0, FORWARD_S), 1, most=8) == 1
    assert (
        1
        < depth.paying_levels(DraftCosts(50.0, 0.0, FORWARD_S), 1, most=8)
        < depth.paying_levels(DraftCosts(50.0, 0.0, FORWARD_S), 2, most=8)
        < 8
    )
    assert depth.paying_levels(DraftCosts(50.0, 0.2, FORWARD_S), 1, most=8) < depth.paying_levels(
        DraftCosts(50.0, 0.0, FORWARD_S), 1, most=8
    )


def drafts(share: float, boldness: float, shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(path confidence, which tokens are right) of drafts [*shape, MOST]: a token is right after a right one with a
    probability that varies from place to place, `share` on average. The draft model says its power 1 / boldness."""
    rng = np.random.default_rng(seed)
    odds = rng.beta(8 * share, 8 * (1 - share), (*shape, MOST))
    return np.cumprod(odds ** (1 / boldness), axis=-1), rng.random(odds.shape) < odds


def num_accepted(right: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """Accepted tokens of drafts [..., MOST] that end at these depths."""
    return np.minimum(np.cumprod(right, axis=-1).sum(axis=-1), depths)


def fixed_speed(right: np.ndarray, cost_s: float, depth: int) -> float:
    """Tokens a second of rounds [rounds, sequences, MOST] with drafts of a fixed depth."""
    rounds, sequences, _ = right.shape
    tokens = num_accepted(right, np.full((rounds, sequences), depth)).sum() + rounds * sequences
    return tokens / (rounds * (FORWARD_S * (1 + ROW_SHARE * depth * sequences) + cost_s * depth))


def speed_by_value(
    confidence: np.ndarray, right: np.ndarray, cost_s: float, is_rejection: bool = False, is_tiered: bool = False
) -> float:
    """The same by value, learnt from nothing. is_rejection: whatever the confidences are; is_tiered: so, and with as
    many levels as a head on a device expands."""
    depth, tokens, seconds = DraftDepth(), 0.0, 0.0
    for path, is_right in zip(confidence, right, strict=True):
        sequences = len(path)
        rate = tokens / max(seconds, 1e-9)
        rate = max(rate, sequences / FORWARD_S)
        costs = DraftCosts(rate, ROW_SHARE * FORWARD_S * rate, FORWARD_S)
        levels = depth.paying_levels(costs, sequences, most=MOST)
        if is_tiered:
            levels = 1 + level_tier(levels - 1, MOST - 1)
        depths = np.full(sequences, levels if is_rejection or is_tiered else 1)
        least, worth = depth.min_confidence(costs.row_price), depth.worth(costs)
        growing = np.full(sequences, not (is_rejection or is_tiered))
        for level in range(1, MOST):
            growing &= path[:, level - 1] >= least
            if not growing.any() or not pays(worth, path[growing, level - 1]):
                break
            depths[growing] += 1
        accepted = num_accepted(is_right, depths)
        num_forwards = int(depths.max())
        tokens += accepted.sum() + sequences
        seconds += FORWARD_S * (1 + ROW_SHARE * depths.sum()) + cost_s * num_forwards
        for own, count, right_ones in zip(path, depths.tolist(), accepted.tolist(), strict=True):
            emitted = np.arange(right_ones + 1, dtype=np.int32)
            emitted[-1] = 99
            depth.observe_tree(chain(own[:count].tolist()), emitted)
        depth.observe_answer(cost_s * num_forwards, num_forwards)
    return tokens / seconds


@pytest.mark.parametrize("sequences", [1, 4, 16])
@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_depth_by_value_is_as_fast_as_the_best_fixed_depth(share, sequences):
    for cost, boldness in itertools.product([0.02, 0.05, 0.1, 0.2], [0.2, 1.0, 3.0]):
        ratios = []
        for seed in (1, 2):
            confidence, right = drafts(share, boldness, (120 if sequences == 1 else 60, sequences), seed)
            best = max(fixed_speed(right, cost, fixed) for fixed in range(1, MOST + 1))
            ratios.append(speed_by_value(confidence, right, cost) / best)
        assert np.mean(ratios) > 0.97, (cost, boldness, ratios)


@pytest.mark.parametrize("cost", [0.02, 0.2])
@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_levels_by_value_are_as_fast_as_the_best_fixed_depth(share, cost):
    confidence, right = drafts(share, 1.0, (600, 1), seed=1)
    best = max(fixed_speed(right, cost, fixed) for fixed in range(1, MOST + 1))
    assert speed_by_value(confidence, right, cost, is_rejection=True) > 0.97 * best


@pytest.mark.parametrize("cost", [0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("sequences", [1, 4, 16])
def test_levels_out_of_few_tiers_lose_little_to_the_best_depth_and_nothing_to_the_whole(sequences, share, cost):
    """They lose most where not even the fewest levels pay."""
    confidence, right = drafts(share, 1.0, (300 if sequences == 1 else 60, sequences), seed=1)
    speeds = {fixed: fixed_speed(right, cost, fixed) for fixed in range(1, MOST + 1)}
    best = max(speeds, key=lambda fixed: speeds[fixed])
    own = speed_by_value(confidence, right, cost, is_tiered=True)
    fewest = 1 + level_tier(0, MOST - 1)
    assert own > (0.94 if best >= fewest else 0.86) * speeds[best]
    assert own > (1.1 if share == 0.5 else 0.99) * speeds[MOST]
