"""What both drafters that learn from a sequence's own past promise: the contract, isolation, restarts, memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.drafters.contract import DraftContext, Drafter
from actors.drafters.registry import create_drafter
from actors.messages import SamplingParams

NAMES = ("prompt_lookup", "suffix")
HUGE = 2**31 - 1
ids = st.integers(0, 3) | st.sampled_from([151_936, HUGE])
texts = st.lists(ids, min_size=1, max_size=50)


def context(seq_id: int, tokens: list[int], start: int = 0, max_nodes: int = 16) -> DraftContext:
    array = np.array(tokens, dtype=np.int32)
    array.flags.writeable = False
    return DraftContext(seq_id, array, start, len(tokens), max_nodes, SamplingParams(seed=1))


def draft(drafter: Drafter, seq_id: int, tokens: list[int], start: int = 0, max_nodes: int = 16) -> DraftTree:
    (tree,) = drafter.propose([context(seq_id, tokens, start, max_nodes)])
    return tree


def content(tree: DraftTree) -> tuple[list[int], list[int], list[float]]:
    return tree.token_ids.tolist(), tree.parents.tolist(), tree.confidence.tolist()


def fresh_draft(name: str, tokens: list[int]) -> tuple[list[int], list[int], list[float]]:
    return content(draft(create_drafter(name), 0, tokens))


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.whole
@given(st.sampled_from(NAMES), texts, st.integers(0, 20))
@settings(max_examples=200)
def test_every_draft_is_a_valid_tree_of_known_tokens_within_its_budget(
    name: str, tokens: list[int], max_nodes: int
) -> None:
    tree = draft(create_drafter(name), 1, tokens, max_nodes=max_nodes)
    assert tree.is_valid(HUGE + 1)
    assert len(tree) <= max_nodes
    assert (tree.token_ids.dtype, tree.parents.dtype, tree.confidence.dtype) == (np.int32, np.int32, np.float32)
    assert set(tree.token_ids.tolist()) <= set(tokens)
    for node, parent in enumerate(tree.parents):
        assert parent < 0 or tree.confidence[node] <= tree.confidence[parent]
    roots = tree.confidence[tree.parents < 0]
    assert roots.sum() <= 1 + 1e-6  # siblings exclude one another


@given(st.sampled_from(NAMES), texts, st.lists(st.integers(1, 5), max_size=50))
@settings(max_examples=150)
def test_catching_up_in_steps_gives_the_draft_of_a_fresh_drafter(
    name: str, tokens: list[int], steps: list[int]
) -> None:
    drafter = create_drafter(name)
    known = 0
    for step in [*steps, len(tokens)]:
        upto = min(known + step, len(tokens))
        if upto > known:
            tree = draft(drafter, 5, tokens[:upto], start=known)
            assert content(tree) == fresh_draft(name, tokens[:upto])
            known = upto


@given(st.sampled_from(NAMES), texts, texts)
@settings(max_examples=100)
def test_interleaved_sequences_draft_as_each_would_alone(name: str, first: list[int], second: list[int]) -> None:
    drafter = create_drafter(name)
    for count in range(1, max(len(first), len(second)) + 1):
        batch = [(1, first), (2, second)]
        contexts = [context(seq_id, text[:count], start=min(count - 1, len(text))) for seq_id, text in batch]
        for tree, (_, text) in zip(drafter.propose(contexts), batch, strict=True):
            assert content(tree) == fresh_draft(name, text[:count])


def test_a_request_leaves_no_trace_in_the_next(name: str) -> None:
    drafter = create_drafter(name)
    draft(drafter, 1, [1, 2, 3, 4, 1, 2])
    drafter.forget(1)
    assert content(draft(drafter, 1, [1, 2])) == ([], [], [])
    assert content(draft(drafter, 2, [1, 2, 9, 1])) == fresh_draft(name, [1, 2, 9, 1])


@pytest.mark.parametrize("start", [0, 3, 7])
def test_a_start_other_than_the_known_length_begins_the_sequence_anew(name: str, start: int) -> None:
    drafter = create_drafter(name)
    draft(drafter, 1, [7, 7, 7, 7, 7])
    tokens = [1, 2, 3, 4, 5, 1, 2, 3]
    assert content(draft(drafter, 1, tokens, start=start)) == fresh_draft(name, tokens)
    assert content(draft(drafter, 1, [*tokens, 4], start=len(tokens))) == fresh_draft(name, [*tokens, 4])


def test_a_budget_of_nothing_still_brings_the_drafter_up_to_date(name: str) -> None:
    drafter = create_drafter(name)
    assert len(draft(drafter, 1, [1, 2, 3, 1], max_nodes=0)) == 0
    assert content(draft(drafter, 1, [1, 2, 3, 1, 2], start=4)) == fresh_draft(name, [1, 2, 3, 1, 2])


def test_new_text_gets_no_draft(name: str) -> None:
    assert len(draft(create_drafter(name), 1, list(range(100)))) == 0


def test_a_longer_match_is_trusted_more(name: str) -> None:
    firsts = [
        float(draft(create_drafter(name), 1, [*text, 50, *text]).confidence[0]) for text in ([1], [1, 2], [1, 2, 3])
    ]
    assert firsts == sorted(set(firsts))


def test_a_repeated_period_is_continued_beyond_the_end_of_the_text(name: str) -> None:
    tree = draft(create_drafter(name), 1, [9, 5, 6, 7, 5, 6, 7, 5, 6, 7], max_nodes=8)
    path = [int(tree.token_ids[0])]
    node = 0
    while (children := np.flatnonzero(tree.parents == node)).size:
        node = int(children[0])
        path.append(int(tree.token_ids[node]))
    assert path == [5, 6, 7, 5, 6, 7, 5, 6][: len(path)]
    assert len(path) >= 6


def test_memory_grows_with_sequences_and_falls_to_nothing_when_all_are_forgotten(name: str) -> None:
    drafter = create_drafter(name)
    assert drafter.memory_bytes() == 0
    tokens = np.random.default_rng(0).integers(0, 50, 3000).tolist()
    draft(drafter, 1, tokens)
    one = drafter.memory_bytes()
    assert 4 * 3000 <= one <= 100 * 3000
    draft(drafter, 2, tokens)
    assert drafter.memory_bytes() == 2 * one
    drafter.forget(1)
    drafter.forget(1)
    assert drafter.memory_bytes() == one
    drafter.forget(2)
    assert drafter.memory_bytes() == 0
