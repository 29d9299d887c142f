"""The static automaton against brute force over documents, its draft trees, and its cost on degenerate text.

Covers also `cache_service.automata.tree_kernels`.
"""

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.automata.static_automaton import MAX_TOKEN_ID, StaticAutomaton, warm_up
from cache_service.automata.suffix_automaton import Cursor
from cache_service.automata.tree_options import TOP_CONTINUATIONS, TreeOptions
from paceline_testing.automata import continuations, occurrences, static_of

BIG = 200_018  # beyond 16 bits
letters = st.integers(0, 3) | st.sampled_from([BIG])
documents = st.lists(st.lists(letters, max_size=20), max_size=6)


def walk(automaton: StaticAutomaton, tokens: list[int]) -> Cursor:
    return automaton.advance(Cursor(), np.array(tokens, np.int32))


def ends_of(docs: list[list[int]], string: list[int]) -> list[tuple[int, int]]:
    """(document, position behind it) of every occurrence; none crosses a border."""
    length = len(string)
    return [
        (index, end)
        for index, doc in enumerate(docs)
        for end in range(length, len(doc) + 1)
        if doc[end - length : end] == string
    ]


def longest_match(docs: list[list[int]], tokens: list[int]) -> list[int]:
    return next((tokens[begin:] for begin in range(len(tokens)) if ends_of(docs, tokens[begin:])), [])


def followers(docs: list[list[int]], string: list[int]) -> Counter[int]:
    return Counter(docs[index][end] for index, end in ends_of(docs, string) if end < len(docs[index]))


def tree_of(
    automaton: StaticAutomaton, tokens: list[int], room: int = 16, **options: float
) -> tuple[list[tuple[int, ...]], list[float]]:
    """Paths from the root, in the order of the nodes, and confidences."""
    token_ids, parents, confidence = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.float32)
    chosen = TreeOptions(**{"acceptance": np.ones(1, np.float32), "floor": 0.0, "prior": 0.0, **options})
    tree = {"token_ids": token_ids, "parents": parents, "confidence": confidence, "count": 0}
    count = automaton.grow_tree(walk(automaton, tokens), chosen, **tree)
    paths: list[tuple[int, ...]] = []
    for node in range(count):
        assert parents[node] < node
        above = paths[parents[node]] if parents[node] >= 0 else ()
        paths.append((*above, int(token_ids[node])))
    return paths, confidence[:count].tolist()


@given(documents, st.lists(letters, max_size=25), st.integers(1, 5))
@settings(max_examples=200)
def test_a_walk_finds_the_longest_suffix_in_any_one_document(
    docs: list[list[int]], tokens: list[int], step: int
) -> None:
    automaton = static_of(docs)
    assert automaton.check_integrity() is None
    cursor = Cursor()
    for begin in range(0, len(tokens), step):
        cursor = automaton.advance(cursor, np.array(tokens[begin : begin + step], np.int32))
        match = longest_match(docs, tokens[: begin + step])
        assert cursor.length == len(match)
        if match:
            assert occurrences(automaton, cursor) == len(ends_of(docs, match))
            following, counts = continuations(automaton, cursor)
            assert dict(zip(following, counts, strict=True)) == followers(docs, match)
            assert counts == sorted(counts, reverse=True)


@given(st.lists(st.lists(st.integers(0, 30), max_size=60), max_size=4), st.integers(0, 30))
@settings(max_examples=100)
def test_many_continuations_are_all_found_and_the_most_frequent_come_first(docs: list[list[int]], token: int) -> None:
    automaton = static_of(docs)
    cursor = walk(automaton, [token])
    expected = followers(docs, [token])
    following, counts = continuations(automaton, cursor)
    assert dict(zip(following, counts, strict=True)) == expected
    most = sorted(expected.values(), reverse=True)[:TOP_CONTINUATIONS]
    assert counts[:TOP_CONTINUATIONS] == most
    for other in expected:
        assert automaton.advance(cursor, np.array([other], np.int32)).length >= 2


@given(documents, st.lists(letters, min_size=1, max_size=10), st.integers(0, 12))
@settings(max_examples=200)
def test_a_tree_holds_the_surest_continuations_with_their_conditional_frequency(
    docs: list[list[int]], tokens: list[int], room: int
) -> None:
    paths, confidence = tree_of(static_of(docs), tokens, room)
    match = longest_match(docs, tokens)
    if not match:
        assert paths == []
        return

    def share(path: tuple[int, ...]) -> float:
        product = 1.0
        for depth in range(len(path)):
            before = [*match, *path[:depth]]
            product *= followers(docs, before)[path[depth]] / len(ends_of(docs, before))
        return product

    assert len(set(paths)) == len(paths) <= room
    assert confidence == pytest.approx([share(path) for path in paths], rel=1e-5)
    assert confidence == sorted(confidence, reverse=True)
    # What was left out is no surer: of every node, and of the root, the next continuation that is not in the tree.
    if len(paths) == room and room:
        for parent in [(), *paths]:
            children = {(*parent, token) for token in followers(docs, [*match, *parent])}
            assert all(share(path) <= confidence[-1] * (1 + 1e-5) for path in children - set(paths))
    elif room:
        assert {path[0] for path in paths} == set(followers(docs, match))


def test_confidence_is_scaled_by_the_match_length_and_by_how_often_the_match_occurred() -> None:
    acceptance = np.array([0.0, 0.5, 0.8, 0.9], np.float32)
    docs = [[1, 2, 3, 4], [1, 2, 3, 4]]
    assert tree_of(static_of(docs), [1, 2], acceptance=acceptance)[1] == pytest.approx([0.8, 0.8 * 0.9])
    expected = 2 / (2 + 4 / 2) * 0.8
    assert tree_of(static_of(docs), [1, 2], acceptance=acceptance, prior=4.0)[1][0] == pytest.approx(expected)
    # A biased match is as good as a shorter one.
    assert tree_of(static_of(docs), [1, 2], acceptance=acceptance, len_bias=1)[1] == pytest.approx([0.5, 0.5 * 0.8])
    assert tree_of(static_of(docs), [1, 2], acceptance=acceptance, len_bias=1, min_match=2)[0] == []


def test_no_more_nodes_stand_at_one_depth_than_the_width() -> None:
    docs = [[1, token, token + 10] for token in range(2, 9)] * 2
    for width in (1, 2, 3):
        paths, _ = tree_of(static_of(docs), [1], room=30, width=width)
        assert Counter(map(len, paths)) == {1: width, 2: width}


def test_nodes_below_the_floor_are_left_out() -> None:
    docs = [[1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 5, 6]]
    paths, confidence = tree_of(static_of(docs), [1], floor=0.3)
    assert paths == [(2,), (2, 4)]
    assert confidence == pytest.approx([0.75, 0.5])


def test_too_little_continuation_is_made_up_from_a_shorter_match() -> None:
    docs = [[7, 1, 2, 3], [8, 1, 2, 4, 5], [9, 1, 2, 3, 6], [9, 1, 2, 3, 6]]
    automaton = static_of(docs)
    assert tree_of(automaton, [7, 1, 2])[0] == [(3,)]
    acceptance = np.array([0.0, 0.4, 0.5, 0.6], np.float32)
    paths, confidence = tree_of(automaton, [7, 1, 2], min_continuation=4, acceptance=acceptance)
    # The node that is there is gone through, not doubled, and the root's children share what it leaves.
    assert paths == [(3,), (3, 6), (4,), (4, 5)]
    left = 1 - 0.6
    assert confidence == pytest.approx(
        [0.6, left * 3 / 4 * 0.5 * 2 / 3 * 0.6, left * 1 / 4 * 0.5, left * 1 / 4 * 0.5 * 0.6]
    )
    assert sum(c for path, c in zip(paths, confidence, strict=True) if len(path) == 1) <= 1


@given(documents, st.lists(letters, min_size=1, max_size=10), st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=150)
def test_a_tree_with_fallbacks_keeps_its_first_nodes_and_its_invariants(
    docs: list[list[int]], tokens: list[int], room: int, min_continuation: int
) -> None:
    automaton = static_of(docs)
    alone, _ = tree_of(automaton, tokens, room)
    paths, confidence = tree_of(automaton, tokens, room, min_continuation=min_continuation)
    assert paths[: len(alone)] == alone
    assert len(set(paths)) == len(paths) <= room
    sure = dict(zip(paths, confidence, strict=True))
    assert all(sure[path] <= sure.get(path[:-1], 1.0) for path in paths)
    assert all(ends_of(docs, [*tokens[-1:], *path]) for path in paths)
    assert sum(c for path, c in sure.items() if len(path) == 1) <= 1 + 1e-5


def test_one_repeated_token_is_linear_in_time_and_size() -> None:
    warm_up()
    seconds, sizes = [], []
    for count in (20_000, 80_000):
        begin = time.process_time()
        automaton = static_of([[5] * count])
        cursor = walk(automaton, [5] * count)
        seconds.append(time.process_time() - begin)
        sizes.append(automaton.memory_bytes)
        assert cursor.length == count
        assert occurrences(automaton, walk(automaton, [5] * 100)) == count - 99
    assert sizes[1] < 5 * sizes[0]
    assert seconds[1] < 16 * max(seconds[0], 0.005)  # quadratic would be 16 times and more


def test_an_empty_corpus_matches_nothing() -> None:
    for docs in ([], [[]], [[], []]):
        automaton = static_of(docs)
        assert (walk(automaton, [1, 2, 3]), tree_of(automaton, [1])[0]) == (Cursor(0, 0), [])


def test_an_id_that_no_vocabulary_has_is_refused() -> None:
    assert walk(static_of([[MAX_TOKEN_ID, 1]]), [MAX_TOKEN_ID]).length == 1
    with pytest.raises(ValueError, match=f"a token id is {MAX_TOKEN_ID + 1}; a corpus holds ids up to {MAX_TOKEN_ID}"):
        static_of([[MAX_TOKEN_ID + 1]])


def test_arrays_of_another_shape_are_refused() -> None:
    arrays = static_of([[1, 2, 1, 3]]).arrays
    assert len(StaticAutomaton(arrays)) == 5
    with pytest.raises(ValueError, match="they must be"):
        StaticAutomaton({name: array for name, array in arrays.items() if name != "root"})
    for name, array in arrays.items():
        with pytest.raises(ValueError, match=f"array {name} is int64"):
            StaticAutomaton({**arrays, name: array.astype(np.int64)})
    with pytest.raises(ValueError, match="they must be one more"):
        StaticAutomaton({**arrays, "links": arrays["links"][:-1]})


def test_a_clone_that_claims_more_edges_than_there_are_is_found_before_they_are_read() -> None:
    """Behind the edges lie others that would pass, so that only the claim itself can be what is wrong."""
    arrays = {name: array.copy() for name, array in static_of([[1, 2, 1, 3, 1, 2], [2, 1, 2, 3]]).arrays.items()}
    longer = np.stack([np.arange(100, dtype=np.int32), np.ones(100, np.int32)], axis=1)
    arrays["edges"], arrays["clones"][1:, 3] = longer[:50], 0
    assert StaticAutomaton(arrays).check_integrity() is None
    arrays["clones"][1, 3] = 60
    assert (
        StaticAutomaton(arrays).check_integrity()
        == "the edges of a clone do not follow those of the one before it (at -1)"
    )


@given(st.data())
@settings(max_examples=300)
def test_whatever_passes_the_integrity_check_can_be_walked_and_drafted_from(data: st.DataObject) -> None:
    arrays = {name: array.copy() for name, array in static_of([[1, 2, 1, 3, 1, 2], [2, 1, 2, 3]]).arrays.items()}
    for _ in range(data.draw(st.integers(1, 3))):
        array = arrays[data.draw(st.sampled_from(sorted(arrays)))].reshape(-1)
        place = data.draw(st.integers(0, len(array) - 1))
        array[place] = data.draw(st.integers(-30, 30) | st.integers(-(2**31), 2**31 - 1))
    automaton = StaticAutomaton(arrays)
    if automaton.check_integrity() is None:
        for tokens in ([1, 2, 1, 2, 3, 1, 1, 2, 1, 3], [3, 3, 2, 1, 2, 2]):
            tree_of(automaton, tokens, min_continuation=16)
