"""Predicted output: drafted where it is right, found again where it is not, and never a matter of correctness."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.drafters import prediction
from actors.drafters.contract import DraftContext
from actors.drafters.prediction import PredictionDrafter
from actors.messages import SamplingParams
from actors.sampling.verification import walk_tree

PROMPT = [900, 901]


@pytest.fixture(scope="module")
def drafter() -> PredictionDrafter:
    return PredictionDrafter()


def propose(
    drafter: PredictionDrafter, output: list[int], predicted: list[int], start: int = 0, max_nodes: int = 16
) -> DraftTree:
    tokens = np.array(PROMPT + output, np.int32)
    tokens.flags.writeable = False
    context = DraftContext(
        1, tokens, start, len(PROMPT), max_nodes, SamplingParams(seed=0), prediction=np.array(predicted, np.int32)
    )
    (tree,) = drafter.propose([context])
    assert tree.is_valid(2**31 - 1)
    assert len(tree) <= max(0, max_nodes)
    return tree


def rounds_to_write(drafter: PredictionDrafter, answer: list[int], predicted: list[int]) -> int:
    """Target forwards until the whole answer is out, when the target says exactly `answer`."""
    output: list[int] = []
    start = rounds = 0
    while len(output) < len(answer):
        tree = propose(drafter, output, predicted, start)
        start = len(PROMPT) + len(output)
        path = []
        at = -1
        for token in answer[len(output) : -1]:
            child = [i for i in range(len(tree)) if tree.parents[i] == at and tree.token_ids[i] == token]
            if not child:
                break
            at = child[0]
            path.append(token)
        output = answer[: len(output) + len(path) + 1]
        rounds += 1
    drafter.forget(1)
    return rounds


def test_without_a_prediction_nothing_is_drafted(drafter):
    assert (len(propose(drafter, [], [])), len(propose(drafter, [1], [1, 2], max_nodes=0))) == (0, 0)


def test_a_right_prediction_is_drafted_from_the_first_token(drafter):
    assert propose(drafter, [], [10, 11, 12, 13]).token_ids.tolist()[:3] == [10, 11, 12]
    answer = list(range(100, 260))
    assert rounds_to_write(drafter, answer, answer) < 20


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a token replaced", lambda text: [*text[:40], 7, *text[41:]]),
        ("three tokens replaced", lambda text: [*text[:40], 7, 8, 9, *text[43:]]),
        ("tokens inserted", lambda text: [*text[:40], 7, 8, 9, *text[40:]]),
        ("tokens removed", lambda text: [*text[:40], *text[50:]]),
        ("parts exchanged", lambda text: [*text[60:], *text[:60]]),
        ("a beginning of its own", lambda text: [7, 8, 9, *text]),
    ],
)
def test_after_an_edit_the_prediction_is_taken_up_again(drafter, name, change):
    predicted = list(range(100, 220))
    answer = change(predicted)
    assert rounds_to_write(drafter, answer, predicted) <= rounds_to_write(drafter, predicted, predicted) + 8


def test_of_equal_places_the_one_ahead_is_taken(drafter):
    predicted = [1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3, 70]
    propose(drafter, [1, 2, 3, 50, 1, 2], predicted)
    tree = propose(drafter, [1, 2, 3, 50, 1, 2, 3], predicted, start=8)
    assert tree.token_ids.tolist()[:1] == [60]
    drafter.forget(1)


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 5), max_size=40),
    st.lists(st.integers(0, 5), min_size=1, max_size=40),
    st.integers(1, 12),
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_drafts_are_trees_of_predicted_tokens_and_come_out_the_same_however_the_answer_was_cut(
    predicted, answer, max_nodes, cuts
):
    whole, parts = PredictionDrafter(), PredictionDrafter()
    position = start = 0
    for cut in cuts:
        position = min(len(answer), position + cut)
        stepwise = propose(parts, answer[:position], predicted, start, max_nodes)
        start = len(PROMPT) + position
    at_once = propose(whole, answer[:position], predicted, 0, max_nodes)
    assert stepwise.token_ids.tolist() == at_once.token_ids.tolist()
    assert stepwise.parents.tolist() == at_once.parents.tolist()
    assert set(at_once.token_ids.tolist()) <= set(predicted)
    assert at_once.confidence[at_once.parents < 0].sum() <= 1 + 1e-6
    path, _ = walk_tree(np.full(1 + len(at_once), 99), at_once.token_ids, at_once.parents)
    assert len(path) == 0


def test_a_sequence_that_starts_over_is_followed_anew(drafter):
    predicted = list(range(100, 130))
    propose(drafter, predicted[:20], predicted)
    assert propose(drafter, [], predicted, start=0).token_ids.tolist()[0] == 100
    drafter.forget(1)
    assert drafter.memory_bytes() == 0


def test_what_a_round_and_a_restart_cost_does_not_grow_with_the_prediction(drafter):
    """Nothing is as predicted, and the last tokens stand everywhere in the prediction."""
    seconds = []
    for size in (2_000, 128_000):
        output = ([7] * 16 + [9]) * 250
        predicted = np.full(size, 7, np.int32)
        place = prediction._Place(predicted, prediction._bigrams_of(predicted), 0)
        begin = time.process_time()
        for _ in range(5):
            prediction._follow(np.array(output, np.int32), 0, predicted, place.bigrams, 0, 0)
        seconds.append(time.process_time() - begin)
    assert seconds[1] < 4 * max(seconds[0], 0.01)  # 64 times as long where all of it is searched


def test_after_a_restart_far_into_the_answer_the_place_is_found_again(drafter):
    predicted = [*range(1000, 6000)]
    answer = [*predicted[:2000], 7, 8, *predicted[2000:4500]]
    assert propose(drafter, answer, predicted).token_ids.tolist()[:2] == [5500, 5501]
    drafter.forget(1)
    rows = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] * 300  # every tenth place is as good; the one that was reached is taken
    tree = propose(drafter, rows[:2500], [*rows[:2500], 50, *rows], max_nodes=1)
    assert tree.token_ids.tolist() == [50]
    drafter.forget(1)
