"""Required nodes: computed whether they pay or not, and no reason to choose the others otherwise."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.draft_tree import DraftTree
from cluster.router.calibration import SourceCalibration
from cluster.router.merged_trees import MergedTrees, Proposal, SequenceLimits, has_tree_shape, merge_trees
from cluster.router.planner import choose_nodes, tally_nodes

VOCAB = 5
Path = tuple[int, ...]


def tree(paths: dict[Path, float], required: set[Path] = frozenset()) -> DraftTree:
    """From paths with their confidence, parents first."""
    index = {path: node for node, path in enumerate(paths)}
    return DraftTree(
        np.array([path[-1] for path in paths], np.int32),
        np.array([index.get(path[:-1], -1) for path in paths], np.int32),
        np.array(list(paths.values()), np.float32),
        required=np.array([path in required for path in paths], np.bool_),
    )


@st.composite
def trees(draw, requires: bool = True) -> DraftTree:
    leaves = draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), max_size=5))
    paths: dict[Path, float] = {}
    for leaf in leaves:
        for end in range(1, len(leaf) + 1):
            if (path := tuple(leaf[:end])) not in paths:
                paths[path] = draw(st.floats(0.0, paths.get(path[:-1], 1.0), width=32))
    wanted = [path for path in paths if requires and draw(st.booleans())]
    return tree(paths, {path[:end] for path in wanted for end in range(1, len(path) + 1)})


def limits_of(count: int, max_nodes: int, max_depth: int = 100, stop: tuple[int, ...] = ()) -> SequenceLimits:
    return SequenceLimits(
        np.full(count, max_nodes, np.int32),
        np.full(count, max_depth, np.int32),
        np.array(stop * count, np.int32),
        np.arange(count + 1, dtype=np.int32) * len(stop),
    )


def paths_of(token_ids: np.ndarray, parents: np.ndarray) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(token_ids.tolist(), parents.tolist(), strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return paths


def by_sequence(merged: MergedTrees) -> list[dict[Path, int]]:
    """Nodes by path, of each sequence; fails if a node's parent is missing."""
    found = []
    for begin, end in pairwise(merged.start.tolist()):
        paths = paths_of(merged.nodes["token_id"][begin:end], merged.nodes["parent"][begin:end])
        found.append({path: begin + node for node, path in enumerate(paths)})
    return found


def required_paths(one: DraftTree) -> set[Path]:
    paths = paths_of(one.token_ids, one.parents)
    return {path for path, required in zip(paths, one.required.tolist(), strict=True) if required}


batches = st.lists(st.lists(st.tuples(st.integers(0, 2), trees()), max_size=3), min_size=1, max_size=4)


@given(batches, st.integers(0, 4), st.integers(1, 5), st.lists(st.floats(0.0, 1.0), max_size=8), st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_required_nodes_stay_with_their_parents_beside_no_more_others_than_allowed(
    batch, max_nodes, max_depth, steps, min_rows
):
    stop = (0, 3)
    limits = limits_of(len(batch), max_nodes, max_depth, stop)
    proposals = [Proposal(index, source, one) for index, found in enumerate(batch) for source, one in found]
    merged, is_valid = merge_trees(proposals, limits, SourceCalibration(3), VOCAB)
    assert is_valid.all()
    verify_s = np.cumsum([1.0, *steps])
    chosen = choose_nodes(merged, limits.max_nodes, float(len(batch)), 0.1, verify_s, min_rows)
    num_others = 0
    for nodes, found in zip(by_sequence(chosen), batch, strict=True):
        wanted = {path for _, one in found for path in required_paths(one) if len(path) <= max_depth}
        assert {path for path, node in nodes.items() if chosen.nodes["is_required"][node]} == wanted
        others = nodes.keys() - wanted
        assert len(others) <= max_nodes
        assert not any(set(path) & set(stop) for path in others)
        assert not any(chosen.nodes["probability"][node] for path, node in nodes.items() if set(path) & set(stop))
        num_others += len(others)
    assert num_others <= len(steps)


@given(batches, st.lists(st.floats(0.0, 1.0), max_size=8), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_where_none_is_required_nothing_is_other_than_without_the_notion(batch, steps, min_rows):
    def chosen(none: np.ndarray | None) -> MergedTrees:
        proposals = [
            Proposal(index, source, replace(one, required=none if none is None else np.zeros(len(one), np.bool_)))
            for index, found in enumerate(batch)
            for source, one in found
        ]
        limits = limits_of(len(batch), 4, stop=(0,))
        merged, _ = merge_trees(proposals, limits, SourceCalibration(3), VOCAB)
        return choose_nodes(merged, limits.max_nodes, float(len(batch)), 0.1, np.cumsum([1.0, *steps]), min_rows)

    without, zeros = chosen(None), chosen(np.zeros(0))
    for field in fields(MergedTrees):
        assert np.array_equal(getattr(without, field.name), getattr(zeros, field.name))


@given(st.lists(trees(), min_size=1, max_size=2), st.lists(st.floats(0.0, 0.5), max_size=6))
@settings(max_examples=60, deadline=None)
def test_the_others_give_the_best_rate_beside_what_is_required(found, steps):
    limits = limits_of(len(found), 100)
    proposals = [Proposal(index, 0, one) for index, one in enumerate(found)]
    merged, _ = merge_trees(proposals, limits, SourceCalibration(1), VOCAB)
    others = np.flatnonzero(~merged.nodes["is_required"])
    if len(others) > 9:
        return
    verify_s = np.cumsum([1.0, *steps])
    chosen = choose_nodes(merged, limits.max_nodes, 1.0, 0.1, verify_s)
    sequence_of = np.repeat(np.arange(len(found)), np.diff(merged.start))
    best = 0.0
    for subset in range(1 << len(others)):
        kept = {int(node) for bit, node in enumerate(others) if subset >> bit & 1}
        taken = kept | set(np.flatnonzero(merged.nodes["is_required"]).tolist())
        has_parents = all(
            merged.nodes["parent"][node] < 0 or merged.start[sequence_of[node]] + merged.nodes["parent"][node] in taken
            for node in kept
        )
        if has_parents and len(kept) < len(verify_s):
            tokens = 1.0 + merged.nodes["probability"][sorted(taken)].sum()
            best = max(best, tokens / (0.1 + verify_s[len(kept)]))
    rate = (1.0 + chosen.nodes["probability"].sum()) / (0.1 + verify_s[(~chosen.nodes["is_required"]).sum()])
    assert rate == pytest.approx(best)


def test_required_nodes_are_kept_where_no_row_is_left_for_others():
    one = tree({(1,): 0.9, (2,): 0.0, (2, 3): 0.0}, {(2,), (2, 3)})
    limits = limits_of(1, 0)
    merged, _ = merge_trees([Proposal(0, 0, one)], limits, SourceCalibration(1), VOCAB)
    chosen = choose_nodes(merged, limits.max_nodes, 1.0, 0.0, np.ones(1))
    assert set(by_sequence(chosen)[0]) == {(2,), (2, 3)}


def test_a_required_node_that_is_no_guess_makes_nobody_surer_and_teaches_nothing():
    window = tree({(1,): 0.0, (1, 2): 0.0}, {(1,), (1, 2)})
    guess = tree({(1,): 0.6})
    calibration, limits = SourceCalibration(2), limits_of(1, 9)
    alone, _ = merge_trees([Proposal(0, 1, guess)], limits, calibration, VOCAB)
    for order in ((0, 1), (1, 0)):
        proposals = [Proposal(0, source, (window, guess)[source]) for source in order]
        merged, _ = merge_trees(proposals, limits, calibration, VOCAB)
        nodes = by_sequence(merged)[0]
        both, only = nodes[1,], nodes[1, 2]
        assert merged.nodes["probability"][both] == pytest.approx(alone.nodes["probability"][0])
        assert (merged.nodes["sources"][both], merged.nodes["best_source"][both]) == (0b10, 1)
        assert (
            merged.nodes["probability"][only],
            merged.nodes["sources"][only],
            merged.nodes["best_source"][only],
        ) == (0.0, 0, 0)
        chosen = choose_nodes(merged, limits.max_nodes, 1.0, 0.0, np.ones(2))
        was = np.ones(2, np.bool_)
        before = calibration.by_sources.curves["trials"].sum(axis=1)
        verified, accepted, _ = tally_nodes(chosen, was, was, calibration)
        assert verified.tolist() == accepted.tolist() == [[0, 1]]
        learnt = calibration.by_sources.curves["trials"].sum(axis=1) - before
        assert learnt.tolist() == pytest.approx([0.0, 1.0, 0.0])  # of the guess, of its source alone


def test_a_required_stop_token_and_what_follows_it_are_no_guesses_and_teach_nothing():
    one = tree({(4,): 0.5, (4, 1): 0.4, (4, 2): 0.3}, {(4,), (4, 1)})
    calibration, limits = SourceCalibration(1), limits_of(1, 9, stop=(4,))
    merged, _ = merge_trees([Proposal(0, 0, one)], limits, calibration, VOCAB)
    assert set(by_sequence(merged)[0]) == {(4,), (4, 1)}
    assert not merged.nodes["sources"].any()
    chosen = choose_nodes(merged, limits.max_nodes, 1.0, 0.0, np.ones(1))
    was = np.ones(2, np.bool_)
    verified, accepted, expected = tally_nodes(chosen, was, ~was, calibration)
    assert (verified.sum(), accepted.sum(), expected.sum()) == (0, 0, 0.0)
    assert calibration.by_sources.curves["trials"].sum() == 0.0


def test_a_phrase_in_the_window_is_a_guess_like_any_other():
    one = tree({(1,): 0.5}, {(1,)})
    calibration, limits = SourceCalibration(1), limits_of(1, 9)
    merged, _ = merge_trees([Proposal(0, 0, one)], limits, calibration, VOCAB)
    assert merged.nodes["probability"][0] == pytest.approx(0.5)
    chosen = choose_nodes(merged, limits.max_nodes, 1.0, 0.0, np.ones(1))
    tally_nodes(chosen, np.ones(1, np.bool_), np.ones(1, np.bool_), calibration)
    assert calibration.by_sources.curves["trials"].sum() == pytest.approx(1.0)


def test_a_tree_that_requires_a_node_but_not_its_parent_is_left_out():
    broken = tree({(1,): 0.0, (1, 2): 0.0}, {(1, 2)})
    assert not broken.is_valid(VOCAB)
    merged, is_valid = merge_trees([Proposal(0, 0, broken)], limits_of(1, 9), SourceCalibration(1), VOCAB)
    assert not is_valid.any()
    assert not len(merged)


def test_requirements_of_another_kind_or_number_never_reach_the_kernels():
    one = tree({(1,): 0.5, (2,): 0.5, (3,): 0.0}, {(3,)})
    assert has_tree_shape(one, 2, 1)
    assert not has_tree_shape(one, 2)
    assert not has_tree_shape(one, 1, 1)
    assert not has_tree_shape(one, 3, 0)
    for odd in (np.zeros(3, np.int32), np.zeros(2, np.bool_), np.zeros((3, 1), np.bool_), [False] * 3):
        assert not has_tree_shape(replace(one, required=odd), 9, 9)
        assert isinstance(odd, list) or not replace(one, required=odd).is_valid(VOCAB)
