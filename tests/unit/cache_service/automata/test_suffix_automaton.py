"""The suffix automaton against brute force, its bounds, and its cost on degenerate text."""

import argparse
import inspect
import re
import time
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.automata.suffix_automaton import SEPARATOR, Cursor, SuffixAutomaton
from paceline_testing.automata import assert_sound, drafted

HUGE = 2**31 - 1

texts = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), max_size=60))
wide_texts = st.lists(st.sampled_from([0, 1, 128_000, 151_936, HUGE - 1, HUGE]), max_size=40)


def automaton_of(tokens: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(np.array(tokens, dtype=np.int32))
    return automaton


def match(automaton: SuffixAutomaton) -> tuple[int, int]:
    """The longest suffix of the text that occurred earlier in it, as (length, end), (0, 0) if there is none."""
    state = automaton._links[len(automaton) + 1]
    return (0, 0) if state == 0 else (int(automaton._clones[~state, 1]), int(automaton._clones[~state, 4]) - 1)


def text_of(automaton: SuffixAutomaton) -> list[int]:
    return automaton.states()[0][1:].tolist()


def num_states(automaton: SuffixAutomaton) -> int:
    return 1 + int(automaton._counts[:2].sum())


def num_transitions(automaton: SuffixAutomaton) -> int:
    return int(automaton._counts.sum())


def earlier_ends(tokens: list[int], length: int) -> list[int]:
    """Where the last `length` tokens end, other than at the end."""
    suffix = tokens[len(tokens) - length :]
    return [end for end in range(length, len(tokens)) if tokens[end - length : end] == suffix]


def longest_repeated_suffix(tokens: list[int]) -> int:
    length = 0
    while length + 1 < len(tokens) and earlier_ends(tokens, length + 1):
        length += 1
    return length


def substrings(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[i:j]) for i in range(len(tokens)) for j in range(i + 1, len(tokens) + 1)}


def python_source_tokens() -> np.ndarray:
    """About 70,000 word pieces of library source with ids by first appearance: text of a realistic shape."""
    source = "".join(inspect.getsource(module) for module in (argparse, typing, inspect, np.ma, pytest.Config))
    pieces = re.findall(r"\w{1,6}|\s+|[^\w\s]", source)
    ids: dict[str, int] = {}
    return np.array([ids.setdefault(piece, len(ids)) for piece in pieces], dtype=np.int32)


@given(texts | wide_texts)
@settings(max_examples=150)
def test_the_match_is_the_longest_suffix_that_occurred_earlier(tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(tokens, 1):
        automaton.extend(np.array([token], dtype=np.int32))
        seen = tokens[:count]
        length, end = match(automaton)
        assert length == longest_repeated_suffix(seen)
        if length:
            assert end in earlier_ends(seen, length)
    assert_sound(automaton)


@given(st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), max_size=8)))
@settings(max_examples=150)
def test_the_match_is_the_most_recent_occurrence(tokens: list[int]) -> None:
    # So few tokens that every chain of links is shorter than the bound.
    length, end = match(automaton_of(tokens))
    if length:
        assert end == earlier_ends(tokens, length)[-1]


def test_the_most_recent_occurrence_is_kept_in_long_random_text() -> None:
    tokens = np.random.default_rng(5).integers(0, 4, 400).tolist()
    automaton = SuffixAutomaton()
    for count, token in enumerate(tokens, 1):
        automaton.extend(np.array([token], dtype=np.int32))
        length, end = match(automaton)
        if length:
            assert end == earlier_ends(tokens[:count], length)[-1]


@given(texts | wide_texts, st.lists(st.integers(1, 9), max_size=60))
@settings(max_examples=100)
def test_the_size_of_the_pieces_makes_no_difference(tokens: list[int], sizes: list[int]) -> None:
    whole = automaton_of(tokens)
    pieces = SuffixAutomaton()
    begin = 0
    for size in [*sizes, len(tokens)]:
        pieces.extend(np.array(tokens[begin : begin + size], dtype=np.int32))
        begin += size
    assert match(pieces) == match(whole)
    assert (num_states(pieces), num_transitions(pieces)) == (num_states(whole), num_transitions(whole))
    assert text_of(pieces) == tokens


@given(texts | wide_texts)
@settings(max_examples=150)
def test_states_and_transitions_stay_within_the_known_bounds(tokens: list[int]) -> None:
    automaton = automaton_of(tokens)
    count = len(tokens) + 1  # the separator before the text is one of the tokens
    if count >= 2:
        assert num_states(automaton) <= 2 * count - 1
    if count >= 3:
        assert num_transitions(automaton) <= 3 * count - 4


def test_the_bounds_are_reached_by_the_texts_known_to_reach_them() -> None:
    # a b b ... b and a b ... b c, where a is the separator before the text; its transition from the start is not kept.
    assert num_states(automaton_of([1] * 20)) == 2 * 21 - 1
    assert num_transitions(automaton_of([1] * 19 + [2])) >= 3 * 21 - 5


@given(texts, texts)
@settings(max_examples=100)
def test_a_cursor_finds_the_longest_suffix_of_foreign_text(tokens: list[int], foreign: list[int]) -> None:
    automaton = automaton_of(tokens)
    known = substrings(tokens)
    cursor = Cursor()
    for count, token in enumerate(foreign, 1):
        cursor = automaton.advance(cursor, np.array([token], dtype=np.int32))
        expected = max((n for n in range(1, count + 1) if tuple(foreign[count - n : count]) in known), default=0)
        assert cursor.length == expected
    assert automaton.advance(Cursor(), np.array(foreign, dtype=np.int32)) == cursor


@given(texts, st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=40))
@settings(max_examples=150)
def test_a_cursor_stays_right_while_the_automaton_grows(tokens: list[int], steps: list[tuple[bool, int]]) -> None:
    automaton = automaton_of(tokens)
    tokens = list(tokens)
    cursor, matched = Cursor(), []
    for grow, token in steps:
        one = np.array([token], dtype=np.int32)
        if grow:
            automaton.extend(one)
            tokens.append(token)
            continue
        cursor = automaton.advance(cursor, one)
        # The reference keeps the string itself: what was matched, and the new token, shortened until it occurs.
        matched.append(token)
        known = substrings(tokens)
        while matched and tuple(matched) not in known:
            matched.pop(0)
        assert cursor.length == len(matched)
        assert not matched or tuple(matched + drafted(automaton, cursor, 3)) in known


def test_no_match_and_no_continuation_crosses_a_separator() -> None:
    automaton = automaton_of([1, 2, 3, SEPARATOR, 4, 1, 2, SEPARATOR, 9, 3, 4, 1, 2])
    assert match(automaton) == (3, 7)  # 4 1 2
    cursor = automaton.advance(Cursor(), np.array([2, 3, SEPARATOR, 4, 1], dtype=np.int32))
    assert cursor.length == 2
    cursor = automaton.advance(Cursor(), np.array([1, 2, 3, 4], dtype=np.int32))
    assert cursor.length == 2  # 3 4; 1 2 3 4 would cross the first document's end
    cursor = automaton.advance(Cursor(), np.array([1, 2, 3], dtype=np.int32))
    assert drafted(automaton, cursor, 5) == []
    assert_sound(automaton)


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=5), st.lists(st.integers(0, 2), max_size=9))
@settings(max_examples=150)
def test_documents_are_matched_each_by_itself(documents: list[list[int]], foreign: list[int]) -> None:
    automaton = automaton_of([token for document in documents for token in [*document, SEPARATOR]])
    known = set().union(*(substrings(document) for document in documents))
    for word in substrings(foreign) | known:
        accepted = automaton.advance(Cursor(), np.array(word, dtype=np.int32)).length == len(word)
        assert accepted == (word in known)
    assert_sound(automaton)


@pytest.mark.parametrize("count", [14, 15, 40])
def test_a_draft_ends_with_the_text_also_where_no_separator_stands(count: int) -> None:
    automaton = SuffixAutomaton()
    automaton._text[2:] = 7  # numpy's fresh memory may hold anything
    automaton.extend(np.arange(count, dtype=np.int32))
    cursor = automaton.advance(Cursor(), np.arange(count - 3, count - 1, dtype=np.int32))
    assert drafted(automaton, cursor, 8) == [count - 1]
    with pytest.raises(ValueError, match=f"ends with token {count - 1}"):
        automaton.append(np.array([5]), np.array([1]), np.array([0]))
    automaton.extend(np.array([SEPARATOR]))
    automaton.append(np.array([5]), np.array([1]), np.array([0]))


def test_an_empty_automaton_matches_nothing() -> None:
    automaton = SuffixAutomaton()
    assert (match(automaton), len(automaton)) == ((0, 0), 0)
    assert automaton.advance(Cursor(), np.array([1, 2], dtype=np.int32)) == Cursor(0, 0)
    assert drafted(automaton, Cursor(), 5) == []
    assert_sound(automaton)


@pytest.mark.parametrize(("token", "dtype"), [(-2, np.int64), (-2, np.int32), (2**31, np.int64)])
def test_ids_that_do_not_fit_are_refused_by_name_and_leave_the_text_alone(token: int, dtype: type) -> None:
    automaton = automaton_of([1, 2])
    with pytest.raises(ValueError, match=str(token)):
        automaton.extend(np.array([3, token], dtype=dtype))
    assert text_of(automaton) == [1, 2]


def test_read_only_strided_and_wide_arrays_are_taken_as_they_are() -> None:
    tokens = np.array([5, 0, 6, 0, 5, 0], dtype=np.int64)
    tokens.flags.writeable = False
    automaton = SuffixAutomaton()
    automaton.extend(tokens[::2])
    assert (text_of(automaton), match(automaton)) == ([5, 6, 5], (1, 1))


def seconds_to_build(tokens: np.ndarray) -> float:
    best = float("inf")
    for _ in range(3):
        automaton = SuffixAutomaton()
        begin = time.thread_time()
        automaton.extend(tokens)
        best = min(best, time.thread_time() - begin)
    return best


# a^n b walks the whole chain of links once; a^n b a^n b ... must not walk it at every token.
@pytest.mark.parametrize(
    "pattern",
    [[3], [1, 2], [0, 0, 1], [0] * 500 + [1]],
    ids=["one token", "two tokens in turn", "three tokens in turn", "one token many times, then another"],
)
def test_degenerate_text_takes_linear_time(pattern: list[int]) -> None:
    tokens = np.resize(np.array(pattern, dtype=np.int32), 400_000)
    seconds_to_build(tokens[:1000])
    # Eight times the text in at most 40 times the time; quadratic would be 64 times. Piecewise growth likewise.
    assert seconds_to_build(tokens) < 40 * max(seconds_to_build(tokens[:50_000]), 1e-4)


def test_one_repeated_token_takes_no_more_memory_than_text() -> None:
    automaton = SuffixAutomaton()
    automaton.extend(np.full(200_000, 17, dtype=np.int32))
    assert match(automaton)[0] == 199_999
    assert automaton.memory_bytes <= 40 * 200_000
    assert_sound(automaton)


def test_source_text_takes_at_most_forty_bytes_a_token_at_every_size() -> None:
    tokens = python_source_tokens()
    automaton = SuffixAutomaton()
    for begin in range(0, len(tokens), 1000):
        automaton.extend(tokens[begin : begin + 1000])
        if len(automaton) >= 10_000:
            assert automaton.memory_bytes <= 40 * len(automaton)
    assert len(automaton) == len(tokens) > 50_000
    assert num_states(automaton) < 1.5 * len(tokens)
    assert_sound(automaton)
