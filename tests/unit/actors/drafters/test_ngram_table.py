"""The n-gram table against plain dictionaries, in each of its modes."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.drafters import ngram_table
from actors.drafters.contract import MAX_CONTEXT, DraftContext, VerifiedRows
from actors.drafters.ngram_table import NgramTableDrafter
from actors.drafters.registry import create_drafters
from actors.errors import InvalidRequest
from actors.messages import SamplingParams


def propose(
    drafter: NgramTableDrafter,
    tokens: list[int],
    start: int = 0,
    seq_id: int = 1,
    max_nodes: int = 8,
    namespace: str = "",
) -> DraftTree:
    array = np.array(tokens, np.int32)
    array.flags.writeable = False
    context = DraftContext(seq_id, array, start, len(tokens), max_nodes, SamplingParams(seed=0), namespace)
    (tree,) = drafter.propose([context])
    assert tree.is_valid(2**31 - 1)
    assert len(tree) <= max_nodes
    assert np.all(np.diff(tree.confidence) <= 0)
    return tree


def soft(context: list[int], successors: list[int], seq_id: int = 1, namespace: str = "") -> VerifiedRows:
    padded = np.full((1, MAX_CONTEXT), -1, np.int32)
    padded[0, MAX_CONTEXT - len(context) :] = context
    probs = np.linspace(0.5, 0.1, len(successors), dtype=np.float32)[None]
    return VerifiedRows(namespace, padded, np.array([successors], np.int32), probs, np.array([seq_id]))


def most_frequent(text: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """What a table of dictionaries drafts after `text`."""
    tables: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    best: dict[tuple[int, ...], int] = {}
    for end in range(1, len(text)):
        for length in range(shortest, min(longest, end) + 1):
            key = tuple(text[end - length : end])
            tables[key][text[end]] += 1
            if tables[key][text[end]] >= tables[key][best.get(key, text[end])]:
                best[key] = text[end]
    drafted = list(text)
    while len(drafted) < len(text) + count:
        keys = [tuple(drafted[-length:]) for length in range(longest, shortest - 1, -1) if length <= len(drafted)]
        token = next((best[key] for key in keys if key in best), None)
        if token is None:
            break
        drafted.append(token)
    return drafted[len(text) :]


@pytest.mark.whole
@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 4) | st.just(151_000), min_size=1, max_size=60),
    st.sampled_from(["one", "many"]),
    st.integers(2, MAX_CONTEXT + 1),
    st.lists(st.integers(1, 12), max_size=4),
)
def test_drafts_are_the_most_frequent_successors_however_the_text_came(text, levels, n, cuts):
    drafter = NgramTableDrafter(n=n, levels=levels, floor=0.0)
    start = 0
    for cut in cuts:
        if start + cut < len(text):
            propose(drafter, text[: start + cut], start)
            start += cut
    tree = propose(drafter, text, start)
    assert tree.token_ids.tolist() == most_frequent(text, n - 1 if levels == "one" else 1, n - 1, 8)


def test_what_the_target_thought_likely_is_drafted_though_it_was_not_emitted():
    fillers, plain = NgramTableDrafter(filler_top_k=3), NgramTableDrafter(filler_top_k=1)
    for drafter in (fillers, plain):
        propose(drafter, [1, 2, 3])
        drafter.remember(soft([1, 2, 3], [9, 8, 7]))
    assert propose(plain, [1, 2, 3], 3).token_ids.tolist() == []
    assert propose(fillers, [1, 2, 3], 3).token_ids.tolist()[0] in (7, 8, 9)


def test_observed_tokens_are_not_counted_twice():
    drafter = NgramTableDrafter()
    prompt = soft([1, 2, 3], [4, 0, 0])
    prompt.probs[:] = [1.0, 0.0, 0.0]
    drafter.remember(prompt)
    assert len(propose(drafter, [1, 2, 3])) == 0


def test_counts_of_a_request_end_with_it():
    drafter = NgramTableDrafter(keep="request", filler_top_k=2)
    text = [1, 2, 3, 1, 2]
    assert propose(drafter, text, seq_id=1).token_ids.tolist()[0] == 3
    assert len(propose(drafter, [1, 2], seq_id=2)) == 0
    drafter.remember(soft([2], [5, 6], seq_id=2))
    assert propose(drafter, [1, 2], 2, seq_id=2).token_ids.tolist()[0] in (5, 6)
    assert propose(drafter, text, 5, seq_id=1).token_ids.tolist()[0] == 3
    assert len(propose(drafter, [1, 2], 0, seq_id=1)) == 0  # it starts over
    for seq_id in (1, 2):
        drafter.forget(seq_id)
    assert drafter.memory_bytes() == 0


def test_counts_of_a_namespace_outlive_its_requests_and_stay_inside():
    drafter = NgramTableDrafter()
    propose(drafter, [1, 2, 3], seq_id=1, namespace="a")
    drafter.forget(1)
    assert propose(drafter, [1, 2], seq_id=2, namespace="a").token_ids.tolist()[0] == 3
    assert len(propose(drafter, [1, 2], seq_id=3, namespace="b")) == 0


def test_an_unknown_context_ends_the_draft_or_is_filled_with_known_tokens():
    text = [1, 2, 3, 4]
    assert len(propose(NgramTableDrafter(unknown="stop"), text)) == 0
    tree = propose(NgramTableDrafter(unknown="random"), text)
    assert len(tree) == 8
    assert set(tree.token_ids.tolist()) <= {2, 3, 4}
    assert tree.confidence[0] < 0.05


def test_a_table_never_holds_more_ngrams_than_it_may_and_always_has_free_slots():
    drafter = NgramTableDrafter(max_ngrams=1 << 12)
    rng = np.random.default_rng(0)
    for seq_id, length in enumerate([3000, 1, 7, 500, 2000] * 12):
        text = rng.integers(0, 50_000, length).tolist()
        propose(drafter, text, seq_id=seq_id)
        propose(drafter, [*text, 5], length, seq_id=seq_id)
        drafter.remember(soft([1, 2, 3], rng.integers(0, 50_000, 3).tolist()))
        drafter.forget(seq_id)
        (table,) = drafter._tables.values()
        assert np.count_nonzero(table.ngrams) == table.num_ngrams <= 1 << 12
        assert np.count_nonzero(table.contexts) == table.num_contexts
        assert 2 * max(table.num_ngrams, table.num_contexts) <= len(table.ngrams)
        assert drafter.memory_bytes() == sum(array.nbytes for array in arrays_of(table)) <= 128 << 12


def arrays_of(table) -> list[np.ndarray]:
    return [table.contexts, table.best, table.best_count, table.totals, table.ngrams, table.occurrences]


def test_one_long_prompt_leaves_what_the_namespace_knew():
    drafter = NgramTableDrafter(max_ngrams=1 << 12)
    phrase = [100, 101, 102, 103, 104]
    propose(drafter, phrase)
    prompt = np.random.default_rng(0).integers(1000, 50_000, 20_000).tolist()
    propose(drafter, prompt, seq_id=2)
    propose(drafter, [*prompt, 7], len(prompt), seq_id=2)
    assert propose(drafter, phrase[:2], seq_id=3).token_ids.tolist() == phrase[2:]
    assert propose(drafter, prompt[-5:-3], seq_id=4).token_ids.tolist()[:3] == prompt[-3:]


def test_the_bytes_of_all_tables_are_bounded_and_the_longest_unused_make_room():
    drafter = NgramTableDrafter(max_ngrams=1 << 10, budget_bytes=1 << 18)
    text = [1, 2, 3]
    for name in range(600):
        propose(drafter, text, seq_id=name, namespace=str(name))
        propose(drafter, text[:2], seq_id=10_000, namespace="0")
        assert drafter.memory_bytes() == sum(table.memory_bytes for table in drafter._tables.values()) <= 1 << 18
    assert propose(drafter, text[:2], seq_id=10_001, namespace="0").token_ids.tolist() == [3]
    assert propose(drafter, text[:2], seq_id=10_001, namespace="1").token_ids.tolist() == []


def test_requests_that_do_not_use_the_drafter_push_out_none_that_does():
    drafter = NgramTableDrafter(keep="request", max_ngrams=64, budget_bytes=1 << 15)
    text = [1, 2, 3, 1, 2]
    propose(drafter, text)
    for seq_id in range(100, 400):
        drafter.remember(soft([7, 8], [1, 2, 3], seq_id=seq_id))
    assert (propose(drafter, text, len(text)).token_ids.tolist()[0], len(drafter._tables)) == (3, 1)


def test_a_request_whose_table_made_room_counts_from_its_start_again():
    drafter = NgramTableDrafter(keep="request", max_ngrams=64, budget_bytes=1 << 15)
    text = [1, 2, 3, 1, 2]
    propose(drafter, text, seq_id=1)
    propose(drafter, [7, 8, 9], seq_id=2)
    assert propose(drafter, text, len(text), seq_id=1).token_ids.tolist()[0] == 3


def has_room(table: ngram_table._Table) -> bool:
    """A search ends at a free slot, so that every table must have some."""
    return all(2 * np.count_nonzero(keys) <= len(keys) for keys in (table.contexts, table.ngrams))


@pytest.mark.parametrize("most", [64, 1 << 10, 1 << 18])
@pytest.mark.parametrize("vocabulary", [3, 40, 150_000])
def test_tables_keep_free_slots_whatever_is_counted_and_cleared(most, vocabulary):
    rng = np.random.default_rng(most + vocabulary)
    table = ngram_table._Table()
    for _ in range(300):
        rows = int(rng.choice([0, 1, 5, 64, 700]))
        contexts = rng.integers(0, vocabulary, (rows, MAX_CONTEXT)).astype(np.int32)
        token_ids = rng.integers(0, vocabulary, rows).astype(np.int32)
        table.count(contexts, token_ids, shortest=1, longest=MAX_CONTEXT, most=most)
        assert has_room(table)
        if rng.random() < 0.05:
            table.clear()


def test_tables_keep_free_slots_when_all_ngrams_have_one_hash(monkeypatch):
    monkeypatch.setattr(ngram_table, "_hash", lambda context, length: np.uint64(2 * context[-1] + 1))
    monkeypatch.setattr(ngram_table, "_count", ngram_table._count.py_func)
    table = ngram_table._Table(64)
    with np.errstate(over="ignore"):
        for token in range(200):
            context = np.full((1, MAX_CONTEXT), token, np.int32)
            # (2 * token + 1) ^ (2 * token) is 1
            table.count(context, np.array([2 * token], np.int32), shortest=1, longest=1, most=1 << 18)
            assert np.count_nonzero(table.contexts) == token + 1
            assert has_room(table)
    assert np.count_nonzero(table.ngrams) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"n": 1},
        {"n": 9},
        {"levels": "two"},
        {"keep": "ever"},
        {"unknown": "?"},
        {"filler_top_k": 0},
        {"max_ngrams": 1},
        {"budget_bytes": 1 << 23},
    ],
)
def test_options_out_of_range_are_named(options):
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        create_drafters(["ngram_table"], options={"ngram_table": options})
