"""Documents that grow by turns in one automaton, the tail that makes of them, and segments joined into one text."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.automata.joined_text import joined_text
from cache_service.automata.live_tail import LiveTail
from cache_service.automata.static_automaton import StaticAutomaton
from cache_service.automata.suffix_automaton import SEPARATOR, Cursor, SuffixAutomaton
from cache_service.automata.tree_options import TreeOptions
from cache_service.formats.documents import Piece, assemble
from cache_service.formats.piece_codec import decode_pieces, encode_pieces
from paceline_testing.automata import assert_sound
from paceline_testing.cache_stores import piece

ACCEPTANCE = np.array([0.0, 0.9, 0.95], np.float32)

# What is appended, in order: which document goes on, and with what.
turns = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=5)), min_size=1, max_size=12
)


def substrings(documents):
    return {tuple(text[i:j]) for text in documents for i in range(len(text)) for j in range(i + 1, len(text) + 1)}


def appended(automaton, steps, ends):
    """Append (document, tokens) in one call; `ends` is where each document ends."""
    after, last = [], {}
    for row, (document, _) in enumerate(steps):
        after.append(~last[document] if document in last else ends.get(document, 0))
        last[document] = row
    tokens = np.array([token for _, new in steps for token in new], np.int32)
    places = automaton.append(tokens, np.array([len(new) for _, new in steps]), np.array(after, np.int64))
    ends.update({document: int(places[row]) for document, row in last.items()})


def by_turns(steps, sizes=()):
    automaton, ends, begin = SuffixAutomaton(), {}, 0
    for size in [*sizes, len(steps)]:
        appended(automaton, steps[begin : begin + size], ends)
        begin += size
    return automaton


def knows(side, word):
    return length_of(side.automaton, word) == len(word)


def documents_of(steps):
    documents = {}
    for document, new in steps:
        documents.setdefault(document, []).extend(new)
    return list(documents.values())


def length_of(automaton, word):
    return automaton.advance(Cursor(), np.array(word, np.int32)).length


@given(turns, st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 2), max_size=8))
@settings(max_examples=150)
def test_documents_that_grow_by_turns_are_matched_whole_and_each_by_itself(steps, sizes, foreign):
    automaton = by_turns(steps, sizes)
    known = substrings(documents_of(steps))
    for word in known:
        assert length_of(automaton, word) == len(word)
    for word in substrings([foreign]):
        assert (length_of(automaton, word) == len(word)) == (word in known)
    assert_sound(automaton)


@given(turns)
@settings(max_examples=100)
def test_it_is_the_automaton_of_the_same_documents_one_after_another(steps):
    whole = SuffixAutomaton()
    for document in documents_of(steps):
        whole.extend(np.array([*document, SEPARATOR], np.int32))
    grown = by_turns(steps)
    assert grown._counts[1] == whole._counts[1], "as many clones"
    for word in substrings(documents_of(steps)):
        after = [set(followers(automaton, word)) for automaton in (grown, whole)]
        assert after[0] == after[1]


def followers(automaton, word):
    return [token for token in range(3) if length_of(automaton, [*word, token]) == len(word) + 1]


@given(turns, st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 12))
@settings(max_examples=150)
def test_every_branch_of_a_draft_stands_behind_a_suffix_of_the_match_in_one_document(steps, context, room):
    automaton, documents = by_turns(steps), documents_of(steps)
    known = substrings(documents)
    cursor = automaton.advance(Cursor(), np.array(context, np.int32))
    tree = grown_tree(automaton, cursor, room)
    assert len(tree) <= room
    assert len(set(tree)) == len(tree), "siblings differ"
    matched = context[len(context) - cursor.length :]
    for path in tree:
        assert any((*matched[i:], *path) in known for i in range(len(matched)))
    goes_on = any((*matched, token) in known for token in range(3))
    assert not (cursor.length and goes_on and room) or tree


def grown_tree(automaton, cursor, room, given=()):
    """The paths of the nodes."""
    ids, parents, sure = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.float32)
    for node, (token, parent, confidence) in enumerate(given):
        ids[node], parents[node], sure[node] = token, parent, confidence
    options = TreeOptions(ACCEPTANCE, floor=0.0, min_continuation=room)
    tree = {"token_ids": ids, "parents": parents, "confidence": sure, "count": len(given)}
    count = automaton.grow_tree(cursor, options, **tree)
    paths = []
    for node in range(count):
        paths.append((*(paths[parents[node]] if parents[node] >= 0 else ()), int(ids[node])))
        assert parents[node] < 0 or sure[node] <= sure[parents[node]]
    assert sure[:count][parents[:count] < 0].sum() <= 1 + 1e-6
    return paths


def test_a_draft_goes_on_across_the_pieces_of_its_document_and_not_beyond_it():
    automaton = by_turns([(0, [1, 2]), (2, [9]), (0, [3, 4]), (1, [7, 2, 8]), (0, [5])])
    cursor = automaton.advance(Cursor(), np.array([1, 2], np.int32))
    assert grown_tree(automaton, cursor, 10) == [(3,), (3, 4), (3, 4, 5), (8,)]
    end = automaton.advance(Cursor(), np.array([4, 5], np.int32))
    assert end.length == 2
    assert grown_tree(automaton, end, 10) == []


def test_a_tree_that_is_there_is_built_upon():
    automaton = by_turns([(0, [1, 2, 3, 4]), (1, [2, 6])])
    cursor = automaton.advance(Cursor(), np.array([1, 2], np.int32))
    assert grown_tree(automaton, cursor, 8, [(3, -1, 0.5), (9, -1, 0.25)]) == [(3,), (9,), (3, 4), (6,)]
    assert grown_tree(automaton, cursor, 2, [(3, -1, 0.5), (9, -1, 0.25)]) == [(3,), (9,)]


def test_pieces_that_make_no_sense_are_refused_and_change_nothing():
    automaton = by_turns([(0, [1, 2])])
    one = np.array([1], np.int32)
    for tokens, lengths, after in [
        (one, [2], [0]),
        (one, [0, 1], [0, 0]),
        (one, [1], [9]),
        (one, [1], [-1]),
        (one, [1], [0, 0]),
        (-one, [1], [0]),
    ]:
        with pytest.raises(ValueError, match=r"must|go on"):
            automaton.append(tokens, np.array(lengths), np.array(after))
    assert automaton.states()[0].tolist() == [SEPARATOR, 1, 2, SEPARATOR]
    with pytest.raises(ValueError, match="has appended documents"):
        StaticAutomaton.freeze(by_turns([(0, [1]), (1, [2]), (0, [3])]))


def test_a_document_that_has_gone_on_is_not_forked():
    automaton, ends = SuffixAutomaton(), {}
    appended(automaton, [(0, [1, 2]), (1, [5])], ends)
    old = dict(ends)
    appended(automaton, [(0, [3])], ends)
    appended(automaton, [(0, [4])], old)
    assert (length_of(automaton, [1, 2, 3]), length_of(automaton, [2, 4])) == (3, 1)
    assert length_of(automaton, [4]) == 1


pieces = st.lists(
    st.builds(
        lambda name, begin, size: piece(name, begin, [(ord(name) * 7 + at) % 5 for at in range(begin, begin + size)]),
        st.sampled_from("abc"), st.integers(0, 12), st.integers(1, 6),
    ),
    max_size=12,
)  # fmt: skip


@given(st.lists(pieces, max_size=4))
@settings(max_examples=150)
def test_a_tail_knows_every_piece_and_nothing_that_no_document_holds(batches):
    tail = LiveTail(vocab_size=5)
    for batch in batches:
        tail.add(batch)
    given_pieces = [part for batch in batches for part in batch]
    known = substrings([run.token_ids.tolist() for run in assemble(given_pieces)])
    side = tail.enter()
    for word in substrings([part.token_ids.tolist() for part in given_pieces]):
        assert length_of(side.automaton, word) == len(word)
    for token in range(5):
        for word in known:
            assert ((*word, token) in known) or length_of(side.automaton, [*word, token]) <= len(word)
    tail.leave(side)
    assert not tail._front.readers
    for key, run in tail._runs.items():
        assert run.end == max(part.end for part in given_pieces if (part.document_id, part.kind) == key)


def test_a_piece_told_again_or_in_part_adds_what_is_new_of_it():
    tail = LiveTail(100)
    assert tail.add([piece("a", 0, [1, 2, 3])]) == 3
    assert tail.add([piece("a", 0, [1, 2, 3]), piece("a", 1, [2])]) == 0
    assert tail.add([piece("a", 2, [3, 4]), piece("a", 4, [5]), piece("b", 0, [1])]) == 3
    assert tail.add([piece("a", 9, [7])]) == 1
    assert tail.add([piece("a", 0, [1], kind=1)]) == 1, "prompts are documents of their own"
    side = tail.enter()
    assert (length_of(side.automaton, [1, 2, 3, 4, 5]), length_of(side.automaton, [5, 7])) == (5, 1)
    tail.leave(side)


def test_tokens_beyond_the_vocabulary_are_left_out():
    tail = LiveTail(vocab_size=10)
    assert (tail.add([piece("a", 0, [1, 10]), piece("b", 0, [2, 9])]), tail.add([piece("a", 2, [3])])) == (2, 1)
    side = tail.enter()
    assert (length_of(side.automaton, [2, 9]), length_of(side.automaton, [1])) == (2, 0)
    tail.leave(side)


def test_a_reader_keeps_what_it_sees_until_it_leaves_and_the_next_sees_all():
    tail = LiveTail(100)
    tail.add([piece("a", 0, [1, 2])])
    side = tail.enter()
    tail.add([piece("a", 2, [3])])  # to the other side
    assert not knows(side, [1, 2, 3])
    done = threading.Event()
    writer = threading.Thread(target=lambda: (tail.add([piece("a", 3, [4])]), done.set()))
    writer.start()
    try:
        assert not done.wait(0.05), "it waits for the reader"
        assert knows(side, [1, 2])
        assert not knows(side, [1, 2, 3])
        other = tail.enter()
        assert knows(other, [1, 2, 3])
        tail.leave(other)
    finally:
        tail.leave(side)
        writer.join(20)
    assert done.is_set()
    side = tail.enter()
    assert knows(side, [1, 2, 3, 4])
    assert side.version == 3
    tail.leave(side)


@pytest.mark.whole
def test_readers_beside_a_writer_never_see_half_a_batch():
    """A cursor of one side is a cursor of the other; what is matched is there."""
    tail, stop, faults = LiveTail(1000), threading.Event(), []
    rng = np.random.default_rng(3)
    text = rng.integers(0, 6, 3000).tolist()

    def read():
        cursor, walked, version = Cursor(), 0, 0
        while not stop.is_set() or walked < 1500:
            side = tail.enter()
            try:
                if side.version < version:
                    faults.append(f"version {side.version} after {version}")
                version = side.version
                step = text[walked : walked + 7]
                cursor = side.automaton.advance(cursor, np.array(step, np.int32))
                walked += len(step)
                begin = max(0, walked - cursor.length)
                if length_of(side.automaton, text[begin:walked]) < min(cursor.length, walked):
                    faults.append(f"no match of {cursor.length} at {walked}")
            finally:
                tail.leave(side)
            if walked >= len(text):
                cursor, walked = Cursor(), 0

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for begin in range(0, len(text), 20):
        tail.add([piece(f"d{begin // 20 % 3}", begin // 60 * 20, text[begin : begin + 20])])
    stop.set()
    for reader in readers:
        reader.join(60)
    assert faults == []
    assert_sound(tail._front.automaton)


def columns_of(parts):
    return decode_pieces(encode_pieces(parts), 1000, 100_000)


@given(st.lists(pieces.filter(bool), max_size=3))
@settings(max_examples=150)
def test_joined_segments_are_the_assembled_documents(segments):
    text, num_separators = joined_text([columns_of(parts) for parts in segments], 100)
    runs = assemble([part for parts in segments for part in parts])
    assert sorted(split(text)) == sorted(run.token_ids.tolist() for run in runs)
    assert num_separators == len(runs)
    assert not len(text) or text[-1] == SEPARATOR


def split(text):
    found = [[]]
    for token in text.tolist():
        if token == SEPARATOR:
            found.append([])
        else:
            found[-1].append(token)
    return [run for run in found if run]


def test_a_token_beyond_the_vocabulary_ends_a_document():
    parts = [piece("a", 0, [1, 2, 99, 98, 3]), piece("b", 0, [99]), piece("c", 0, [4])]
    text, num_separators = joined_text([columns_of(parts)], 98)
    assert sorted(split(text)) == [[1, 2], [3], [4]]
    assert num_separators == (text == SEPARATOR).sum() == 3
    assert joined_text([], 98)[0].tolist() == []


def test_where_pieces_disagree_the_first_then_the_longer_wins():
    parts = [
        piece("a", 2, [7, 7]),
        piece("a", 0, [1, 2, 3]),
        piece("a", 0, [1, 2]),
        Piece(bytes(16), 0, np.array([5], np.int32)),
    ]
    text, _ = joined_text([columns_of(parts)], 98)
    assert sorted(split(text)) == [[1, 2, 3, 7], [5]]
