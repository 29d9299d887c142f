"""Merging trees, and choosing nodes that pay beside required ones, which are computed whether they pay or not."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.draft_tree import DraftTree, depths_of
from cluster.router.calibration import SourceCalibration
from cluster.router.merged_trees import (
    MergedTrees,
    Proposal,
    SequenceLimits,
    best_paths,
    has_tree_shape,
    merge_trees,
)
from cluster.router.planner import choose_nodes, most_nodes_that_can_pay, tally_nodes

VOCAB_SIZE = 6


def tree(nodes, confidence=None, required=None):
    """From (token, parent) pairs; confidence halves with depth unless given."""
    tokens = np.array([token for token, _ in nodes], np.int32)
    parents = np.array([parent for _, parent in nodes], np.int32)
    if confidence is None:
        confidence = 0.5 ** depths_of(parents)
    required = None if required is None else np.array(required, np.bool_)
    return DraftTree(tokens, parents, np.array(confidence, np.float32), required=required)


def limits(num_sequences, max_nodes=100, max_depth=100, stop=()):
    stops = list(stop) * num_sequences
    return SequenceLimits(
        np.full(num_sequences, max_nodes, np.int32),
        np.full(num_sequences, max_depth, np.int32),
        np.array(stops, np.int32),
        np.arange(num_sequences + 1, dtype=np.int32) * len(stop),
    )


def merge(proposals, num_sequences=1, **bounds):
    return merge_trees(proposals, limits(num_sequences, **bounds), SourceCalibration(4), VOCAB_SIZE)


def paths(merged, sequence):
    """{tokens from the root: node} of one sequence. Parents come before children, siblings have distinct tokens."""
    begin, end = merged.start[sequence], merged.start[sequence + 1]
    found = {}
    prefixes = []
    for node in range(begin, end):
        parent = merged.nodes["parent"][node]
        assert -1 <= parent < node - begin
        prefix = (prefixes[parent] if parent >= 0 else ()) + (int(merged.nodes["token_id"][node]),)
        prefixes.append(prefix)
        assert prefix not in found
        found[prefix] = merged.nodes[node]
    return found


@st.composite
def draft_trees(draw, is_valid=True, requires=False):
    count = draw(st.integers(0, 10))
    nodes, seen = [], set()
    for index in range(count):
        node = (draw(st.integers(0, VOCAB_SIZE - 1)), draw(st.integers(-1, index - 1)))
        if node[::-1] not in seen or not is_valid:
            if is_valid and node[1] >= len(nodes):
                continue
            seen.add(node[::-1])
            nodes.append(node)
    confidence = [draw(st.floats(0.0, 1.0, width=32)) for _ in nodes]
    required = [requires and draw(st.booleans()) for _ in nodes]
    for node in reversed(range(len(nodes))):
        if required[node] and nodes[node][1] >= 0:
            required[nodes[node][1]] = True
    return tree(nodes, confidence, required if requires else None)


def own_paths(proposal):
    prefixes = []
    for token, parent in zip(proposal.token_ids.tolist(), proposal.parents.tolist(), strict=True):
        prefixes.append((prefixes[parent] if parent >= 0 else ()) + (token,))
    return prefixes


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), draft_trees()), max_size=3), min_size=1, max_size=4), st.data())
@settings(max_examples=150)
def test_merged_trees_hold_every_path_once_and_know_who_proposed_it(batch, data):
    stop = data.draw(st.sampled_from([(), (0,), (0, 3)]))
    max_depth = data.draw(st.integers(1, 5))
    proposals = [Proposal(i, source, one) for i, sequence in enumerate(batch) for source, one in sequence]
    merged, is_valid = merge(proposals, len(batch), max_depth=max_depth, stop=stop)
    assert is_valid.all()
    for index, sequence in enumerate(batch):
        expected = {}
        for source, one in sequence:
            for path in own_paths(one):
                if len(path) <= max_depth and not set(path) & set(stop):
                    expected[path] = expected.get(path, 0) | 1 << source
        found = paths(merged, index)
        assert {path: node["sources"] for path, node in found.items()} == expected
        children = {}
        for path, node in found.items():
            probability = node["probability"]
            parent = found[path[:-1]]["probability"] if len(path) > 1 else 1.0
            assert 0.0 <= probability <= parent
            children[path[:-1]] = children.get(path[:-1], 0.0) + probability
            assert children[path[:-1]] <= parent + 1e-9


@given(st.lists(draft_trees(is_valid=False), min_size=1, max_size=4))
@settings(max_examples=150)
def test_a_tree_is_left_out_exactly_when_it_breaks_its_invariants(trees):
    _, is_valid = merge([Proposal(0, 0, one) for one in trees])
    assert is_valid.tolist() == [one.is_valid(VOCAB_SIZE) for one in trees]


@pytest.mark.parametrize(
    "broken",
    [
        tree([(VOCAB_SIZE, -1)]),
        tree([(-1, -1)]),
        DraftTree(np.zeros(1, np.int32), np.zeros(1, np.int32), np.ones(1, np.float32)),
        DraftTree(np.zeros(1, np.int32), np.full(1, -2, np.int32), np.ones(1, np.float32)),
        tree([(0, -1)], [float("nan")]),
        tree([(0, -1)], [1.5]),
        tree([(0, -1), (0, -1)]),
        tree([(1, -1), (2, 0)], [0.0, 0.0], [False, True]),  # requires a node, but not its parent
    ],
)
def test_a_broken_tree_does_not_take_the_others_with_it(broken):
    merged, is_valid = merge([Proposal(0, 0, broken), Proposal(0, 1, tree([(1, -1), (2, 0)]))])
    assert is_valid.tolist() == [False, True]
    assert set(paths(merged, 0)) == {(1,), (1, 2)}


@pytest.mark.parametrize(
    "shapeless",
    [
        DraftTree(np.zeros(1, np.int64), np.full(1, -1, np.int32), np.ones(1, np.float32)),
        DraftTree(np.zeros(1, np.int32), np.full(1, -1.0), np.ones(1, np.float32)),
        DraftTree(np.zeros(1, np.int32), np.full(1, -1, np.int32), np.ones(2, np.float32)),
        DraftTree(np.zeros((1, 1), np.int32), np.full((1, 1), -1, np.int32), np.ones((1, 1), np.float32)),
        DraftTree([0], [-1], [1.0]),
        tree([(token, -1) for token in range(6)]),
    ],
)
def test_arrays_of_another_kind_or_size_never_reach_the_kernels(shapeless):
    assert not has_tree_shape(shapeless, max_nodes=5)


def test_sources_that_agree_are_trusted_more_than_either_alone():
    alone, _ = merge([Proposal(0, 0, tree([(1, -1)], [0.6]))])
    both, _ = merge([Proposal(0, 0, tree([(1, -1)], [0.6])), Proposal(0, 1, tree([(1, -1)], [0.5]))])
    assert alone.nodes["probability"][0] == pytest.approx(0.6)
    assert 0.6 < both.nodes["probability"][0] < 0.8
    assert both.nodes["best_source"][0] == 0


def test_no_node_can_pay_on_a_steep_curve_and_all_on_a_flat_one():
    assert most_nodes_that_can_pay(1.0, 0.0, 2.0 * np.arange(1, 5) ** 1.5) == 0
    assert most_nodes_that_can_pay(1.0, 0.0, np.full(4, 1.0)) == 3


def test_exploring_verifies_more_rows_than_pay():
    merged, _ = merge([Proposal(0, 0, tree([(1, -1), (2, 0), (3, 1)], [0.9, 0.8, 0.7]))])
    steep = 1.0 * np.arange(1, 5)
    assert len(choose_nodes(merged, np.full(1, 10, np.int32), 1.0, 0.0, steep, 2)) == 2
    assert len(choose_nodes(merged, np.full(1, 10, np.int32), 1.0, 0.0, steep, 99)) == 3


def test_every_source_learns_from_the_nodes_that_were_verified_and_from_no_others():
    first, second = tree([(1, -1), (2, 0)], [0.9, 0.8]), tree([(1, -1), (5, -1)], [0.7, 0.0])
    calibration = SourceCalibration(2)
    merged, _ = merge_trees([Proposal(0, 0, first), Proposal(0, 1, second)], limits(1), calibration, VOCAB_SIZE)
    chosen = choose_nodes(merged, np.full(1, 10, np.int32), 1.0, 0.0, np.array([1.0, 1.0, 1.0, 1.001]))
    assert set(paths(chosen, 0)) == {(1,), (1, 2)}
    accepted = np.array([True, False])
    verified, right, expected = tally_nodes(chosen, np.ones(2, np.bool_), accepted, calibration)
    assert verified.tolist() == [[2, 1]]
    assert right.tolist() == [[1, 1]]
    assert expected == pytest.approx(np.array([[chosen.nodes["probability"].sum(), chosen.nodes["probability"][0]]]))
    assert calibration.by_sources.curves["trials"].sum(axis=1).tolist() == pytest.approx([1.0, 0.0, 1.0, 0.0, 0.0])
    assert calibration.by_sources.curves["hits"].sum(axis=1).tolist() == pytest.approx([0.0, 0.0, 1.0, 0.0, 0.0])
    tally_nodes(chosen, np.zeros(2, np.bool_), accepted, calibration)
    assert calibration.by_sources.curves["trials"].sum() == pytest.approx(2.0)


def test_a_node_that_one_source_alone_proposes_comes_to_be_worth_less_than_one_of_two():
    calibration = SourceCalibration(2)
    both, alone = tree([(1, -1)], [0.5]), tree([(1, -1), (2, -1)], [0.5, 0.5])
    unbounded = np.full(1, 10, np.int32)
    for _ in range(200):
        proposals = [Proposal(0, 0, both), Proposal(0, 1, alone)]
        merged, _ = merge_trees(proposals, limits(1), calibration, VOCAB_SIZE)
        chosen = choose_nodes(merged, unbounded, 1.0, 0.0, np.array([1.0, 1.001, 1.002]), 2)
        is_accepted = chosen.nodes["token_id"] == 1  # what both propose is always right, the other token never
        tally_nodes(chosen, np.ones(len(chosen), np.bool_), is_accepted, calibration)
        calibration.end_round()
    probability = dict(zip(merged.nodes["token_id"].tolist(), merged.nodes["probability"].tolist(), strict=True))
    assert probability[1] > 0.8
    assert probability[2] < 0.1


def test_what_a_source_alone_proposes_beside_others_says_nothing_of_a_sequence_that_has_no_other():
    calibration, one = SourceCalibration(2), tree([(1, -1)], [0.8])
    for _ in range(100):
        teach(calibration, [Proposal(0, 0, one)], limits(1), [False], None)
    beside, only = (
        merge_trees([Proposal(0, 0, one, 0, is_only)], limits(1), calibration, VOCAB_SIZE)[0]
        for is_only in (False, True)
    )
    assert beside.nodes["probability"][0] < 0.1
    assert only.nodes["probability"][0] == pytest.approx(0.8)
    for _ in range(100):
        teach(calibration, [Proposal(0, 0, one, 0, True)], limits(1), [False], None)
    only, _ = merge_trees([Proposal(0, 0, one, 0, True)], limits(1), calibration, VOCAB_SIZE)
    assert only.nodes["probability"][0] < 0.1


def teach(calibration, proposals, bounds, is_accepted, namespaces):
    merged, _ = merge_trees(proposals, bounds, calibration, VOCAB_SIZE)
    times = 1.0 + 0.001 * np.arange(len(merged) + 1)
    chosen = choose_nodes(merged, bounds.max_nodes, 1.0, 0.0, times, len(merged))
    assert len(chosen) == len(is_accepted)
    tally_nodes(chosen, np.ones(len(chosen), np.bool_), np.array(is_accepted), calibration)
    calibration.end_round(namespaces)


def probabilities(calibration, asked, one):
    """Probabilities of the tree's only node for each (source, group)."""
    proposals = [Proposal(i, source, one, group) for i, (source, group) in enumerate(asked)]
    merged, _ = merge_trees(proposals, limits(len(asked)), calibration, VOCAB_SIZE)
    return merged.nodes["probability"].tolist()


def test_no_namespace_learns_from_another():
    mixed, alone = SourceCalibration(2), SourceCalibration(2)
    one, two = tree([(1, -1)], [0.8]), tree([(1, -1), (2, -1)], [0.6, 0.4])
    mine = alone.group("b")
    others, also_mine = mixed.group("a"), mixed.group("b")
    assert others != also_mine
    for i in range(150):
        for _ in range(i % 4):  # a has rounds of its own in between
            teach(mixed, [Proposal(0, 0, one, others), Proposal(0, 1, two, others)], limits(1), [False] * 2, ["a"])
        both = [Proposal(0, 0, one, others), Proposal(1, 0, one, also_mine), Proposal(1, 1, two, also_mine)]
        is_right = [i % 2 == 0, i % 3 == 0]
        teach(mixed, both, limits(2), [False, *is_right], ["a", "b"])
        teach(alone, [Proposal(0, 0, one, mine), Proposal(0, 1, two, mine)], limits(1), is_right, ["b"])
    proposals = [Proposal(0, 0, one, mine), Proposal(0, 1, two, mine)]
    expected, _ = merge_trees(proposals, limits(1), alone, VOCAB_SIZE)
    proposals = [Proposal(0, 0, one, also_mine), Proposal(0, 1, two, also_mine)]
    found, _ = merge_trees(proposals, limits(1), mixed, VOCAB_SIZE)
    assert found.nodes["probability"].tolist() == expected.nodes["probability"].tolist()
    assert found.nodes["probability"].max() > 0.3  # while all that a saw was wrong
    assert max(probabilities(mixed, [(0, others), (1, others)], one)) < 0.1


def test_a_namespace_whose_curves_have_gone_to_another_begins_anew():
    calibration = SourceCalibration(2, max_namespaces=2)
    one = tree([(1, -1)], [0.9])
    group = calibration.group("a")
    for _ in range(50):
        teach(calibration, [Proposal(0, 1, one, group)], limits(1), [False], ["a"])
    assert probabilities(calibration, [(1, group)], one)[0] < 0.1
    for name in "bcd":
        assert probabilities(calibration, [(1, calibration.group(name))], one) == [pytest.approx(0.9)]
    assert probabilities(calibration, [(1, calibration.group("a"))], one) == [pytest.approx(0.9)]
    assert len(calibration.by_sources.curves) == 3 * 5
    calibration.end_round(["nobody"])


def test_no_proposals_are_merged_to_nothing():
    merged, is_valid = merge([], 3)
    assert isinstance(merged, MergedTrees)
    assert merged.start.tolist() == [0, 0, 0, 0]
    assert len(choose_nodes(merged, np.full(3, 4, np.int32), 3.0, 0.0, np.ones(5))) == len(is_valid) == 0


BATCHES = st.lists(
    st.lists(st.tuples(st.integers(0, 2), draft_trees(requires=True)), max_size=3), min_size=1, max_size=4
)


def proposals_of(batch):
    return [Proposal(index, source, one) for index, found in enumerate(batch) for source, one in found]


@given(BATCHES, st.integers(0, 4), st.integers(1, 5), st.lists(st.floats(0.0, 1.0), max_size=8), st.integers(0, 9))
@settings(max_examples=150)
def test_required_nodes_stay_with_their_parents_beside_no_more_others_than_allowed(
    batch, max_nodes, max_depth, steps, min_rows
):
    stop = (0, 3)
    merged, is_valid = merge(proposals_of(batch), len(batch), max_nodes=max_nodes, max_depth=max_depth, stop=stop)
    assert is_valid.all()
    bounds = np.full(len(batch), max_nodes, np.int32)
    chosen = choose_nodes(merged, bounds, float(len(batch)), 0.1, np.cumsum([1.0, *steps]), min_rows)
    num_others = 0
    for index, found in enumerate(batch):
        nodes = paths(chosen, index)
        required = [pair for _, one in found for pair in zip(own_paths(one), one.required, strict=True)]
        wanted = {path for path, is_required in required if is_required and len(path) <= max_depth}
        assert {path for path, node in nodes.items() if node["is_required"]} == wanted
        others = nodes.keys() - wanted
        assert len(others) <= max_nodes
        assert not any(set(path) & set(stop) for path in others)
        assert not any(node["probability"] for path, node in nodes.items() if set(path) & set(stop))
        num_others += len(others)
    assert num_others <= len(steps)


@given(BATCHES, st.lists(st.floats(0.0, 1.0), max_size=8), st.integers(0, 5))
@settings(max_examples=100)
def test_where_none_is_required_nothing_is_other_than_without_the_notion(batch, steps, min_rows):
    def chosen(zeros):
        plain = [
            [(source, replace(one, required=np.zeros(len(one), np.bool_) if zeros else None)) for source, one in found]
            for found in batch
        ]
        merged, _ = merge(proposals_of(plain), len(batch), max_nodes=4, stop=(0,))
        bounds = np.full(len(batch), 4, np.int32)
        return choose_nodes(merged, bounds, float(len(batch)), 0.1, np.cumsum([1.0, *steps]), min_rows)

    without, zeros = chosen(False), chosen(True)
    for field in fields(MergedTrees):
        assert np.array_equal(getattr(without, field.name), getattr(zeros, field.name))


@pytest.mark.parametrize("requires", [False, True])
@given(data=st.data(), steps=st.lists(st.floats(0.0, 0.5), max_size=8))
@settings(max_examples=60)
def test_the_nodes_kept_give_the_best_rate_that_any_choice_gives_beside_what_is_required(requires, data, steps):
    found = data.draw(st.lists(draft_trees(requires=requires), min_size=1, max_size=2))
    max_nodes = np.array([data.draw(st.integers(0, 6)) for _ in found], np.int32)
    merged, _ = merge([Proposal(index, 0, one) for index, one in enumerate(found)], len(found))
    nodes, required = merged.nodes, np.flatnonzero(merged.nodes["is_required"])
    others = np.flatnonzero(~nodes["is_required"])
    if len(others) > 9:
        return
    verify_s = np.cumsum([1.0, *steps])
    chosen = choose_nodes(merged, max_nodes, float(len(found)), 0.1, verify_s)
    sequence_of = np.repeat(np.arange(len(found)), np.diff(merged.start))
    parents = np.where(nodes["parent"] < 0, -1, nodes["parent"] + merged.start[sequence_of])
    best = 0.0
    for subset in range(1 << len(others)):
        kept = [int(node) for bit, node in enumerate(others) if subset >> bit & 1]
        taken = {-1, *kept, *required.tolist()}
        is_allowed = len(kept) < len(verify_s) and {*parents[kept].tolist()} <= taken
        if is_allowed and (np.bincount(sequence_of[kept], minlength=len(found)) <= max_nodes).all():
            tokens = len(found) + nodes["probability"][[*kept, *required]].sum()
            best = max(best, tokens / (0.1 + verify_s[len(kept)]))
    rate = (len(found) + chosen.nodes["probability"].sum()) / (0.1 + verify_s[(~chosen.nodes["is_required"]).sum()])
    assert rate == pytest.approx(best)
    for sequence in range(len(found)):
        before, after = paths(merged, sequence), paths(chosen, sequence)
        assert all(before[path]["probability"] == node["probability"] for path, node in after.items())


def test_a_required_node_that_is_no_guess_makes_nobody_surer_and_teaches_nothing():
    window, guess = tree([(1, -1), (2, 0)], [0.0, 0.0], [True, True]), tree([(1, -1)], [0.6])
    calibration, bounds = SourceCalibration(2), limits(1, 9)
    alone, _ = merge_trees([Proposal(0, 1, guess)], bounds, calibration, VOCAB_SIZE)
    for order in ((0, 1), (1, 0)):
        proposals = [Proposal(0, source, (window, guess)[source]) for source in order]
        merged, _ = merge_trees(proposals, bounds, calibration, VOCAB_SIZE)
        both, only = paths(merged, 0)[1,], paths(merged, 0)[1, 2]
        assert both["probability"] == pytest.approx(alone.nodes["probability"][0])
        assert (both["sources"], both["best_source"]) == (0b10, 1)
        assert (only["probability"], only["sources"], only["best_source"]) == (0.0, 0, 0)
        chosen = choose_nodes(merged, bounds.max_nodes, 1.0, 0.0, np.ones(2))
        was = np.ones(2, np.bool_)
        before = calibration.by_sources.curves["trials"].sum(axis=1)
        verified, accepted, _ = tally_nodes(chosen, was, was, calibration)
        assert verified.tolist() == accepted.tolist() == [[0, 1]]
        learnt = calibration.by_sources.curves["trials"].sum(axis=1) - before
        assert learnt.tolist() == pytest.approx([0.0, 1.0, 0.0, 0.0, 0.0])  # the guess counts, for its source alone


def test_a_required_stop_token_and_what_follows_it_are_no_guesses_and_teach_nothing():
    one = tree([(4, -1), (1, 0), (2, 0)], [0.5, 0.4, 0.3], [True, True, False])
    calibration, bounds = SourceCalibration(1), limits(1, 9, stop=(4,))
    merged, _ = merge_trees([Proposal(0, 0, one)], bounds, calibration, VOCAB_SIZE)
    assert set(paths(merged, 0)) == {(4,), (4, 1)}
    assert not merged.nodes["sources"].any()
    chosen = choose_nodes(merged, bounds.max_nodes, 1.0, 0.0, np.ones(1))
    was = np.ones(2, np.bool_)
    verified, accepted, expected = tally_nodes(chosen, was, ~was, calibration)
    assert (verified.sum(), accepted.sum(), expected.sum()) == (0, 0, 0.0)
    assert calibration.by_sources.curves["trials"].sum() == 0.0


def test_a_phrase_in_the_window_is_a_guess_like_any_other():
    calibration, bounds = SourceCalibration(1), limits(1, 9)
    merged, _ = merge_trees([Proposal(0, 0, tree([(1, -1)], [0.5], [True]))], bounds, calibration, VOCAB_SIZE)
    assert merged.nodes["probability"][0] == pytest.approx(0.5)
    chosen = choose_nodes(merged, bounds.max_nodes, 1.0, 0.0, np.ones(1))
    tally_nodes(chosen, np.ones(1, np.bool_), np.ones(1, np.bool_), calibration)
    assert calibration.by_sources.curves["trials"].sum() == pytest.approx(1.0)


def test_requirements_of_another_kind_or_number_never_reach_the_kernels():
    one = tree([(1, -1), (2, -1), (3, -1)], [0.5, 0.5, 0.0], [False, False, True])
    assert has_tree_shape(one, 2, 1)
    assert not has_tree_shape(one, 2)
    assert not has_tree_shape(one, 1, 1)
    assert not has_tree_shape(one, 3, 0)
    for odd in (np.zeros(3, np.int32), np.zeros(2, np.bool_), np.zeros((3, 1), np.bool_), [False] * 3):
        assert not has_tree_shape(replace(one, required=odd), 9, 9)
        assert isinstance(odd, list) or not replace(one, required=odd).is_valid(VOCAB_SIZE)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(draft_trees(), max_size=3), min_size=1, max_size=3))
def test_the_best_path_is_the_one_on_which_most_tokens_are_expected(trees):
    proposals = [Proposal(index, source, one) for index, own in enumerate(trees) for source, one in enumerate(own)]
    merged, _ = merge(proposals, len(trees))
    best = best_paths(merged)
    for sequence in range(len(trees)):
        probability = {path: float(node["probability"]) for path, node in paths(merged, sequence).items()}
        expected = {path: sum(probability[path[:end]] for end in range(1, len(path) + 1)) for path in probability}
        assert best.tree(sequence).is_chain
        chain = paths(best, sequence)
        assert set(chain) <= set(probability)
        if expected:
            assert expected[max(chain, key=len)] == pytest.approx(max(expected.values()))
