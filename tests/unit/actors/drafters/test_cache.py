"""The cache drafter: which automata it drafts from, how it keeps its place in them, and that it is nothing without."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.drafters.cache import CacheDrafter
from actors.drafters.contract import DraftContext
from actors.drafters.registry import create_drafter, create_drafters
from actors.messages import SamplingParams
from cache_service.automata.automata_index import Automata
from cache_service.automata.live_tail import LiveTail
from cache_service.automata.static_automaton import StaticAutomaton
from cache_service.automata.suffix_automaton import SEPARATOR, SuffixAutomaton
from paceline_testing.cache_stores import piece

VOCAB_SIZE = 1000
texts = st.lists(st.integers(0, 3), min_size=1, max_size=20)


class Shelf:
    """Automata by namespace, as a test puts them there."""

    def __init__(self):
        self.by_namespace, self.asked, self.serial = {}, [], 0

    def put(self, namespace, base=(), tail=()):
        """Documents of the base, pieces (name, offset, tokens) of the tail."""
        automaton = SuffixAutomaton()
        for document in base:
            automaton.extend(np.array([*document, SEPARATOR], np.int32))
        live = LiveTail(VOCAB_SIZE)
        self.serial += 2
        static = StaticAutomaton.freeze(automaton) if base else None
        self.by_namespace[namespace] = Automata(static, self.serial, live, self.serial + 1)
        self.add(namespace, *tail)
        return self

    def add(self, namespace, *pieces):
        for name, offset, tokens in pieces:
            self.by_namespace[namespace].tail.add([piece(name, offset, tokens)])

    def follow(self, namespace):
        self.asked.append(namespace)

    def automata(self, namespace):
        return self.by_namespace.get(namespace)


def draft(drafter, tokens, start=0, max_nodes=16, seq_id=1, namespace="mine", **fields):
    array = np.array(tokens, np.int32)
    array.flags.writeable = False
    sampling = SamplingParams(seed=1)
    (tree,) = drafter.propose([DraftContext(seq_id, array, start, 1, max_nodes, sampling, namespace, **fields)])
    assert tree.is_valid(VOCAB_SIZE)
    assert len(tree) <= max_nodes
    assert tree.confidence[tree.parents < 0].sum() <= 1 + 1e-5
    return tree


def paths_of(tree):
    paths = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def content(tree):
    return tree.token_ids.tolist(), tree.parents.tolist(), tree.confidence.tolist()


def test_without_an_index_it_proposes_nothing_and_keeps_nothing():
    drafter = create_drafter("cache")
    assert (len(draft(drafter, [1, 2, 1, 2])), drafter.memory_bytes()) == (0, 0)


def test_the_index_is_given_by_the_engine():
    shelf = Shelf().put("mine", [[1, 2, 3]])
    drafters = create_drafters(("cache", "suffix"), index=shelf, options={"cache": {"floor": "0"}})
    assert paths_of(draft(drafters["cache"], [1, 2])) == [(3,)]


def test_the_longest_match_comes_first_wherever_it_is():
    for base, tail in (([[3, 1, 2, 8]], [5, 1, 2, 7]), ([[5, 1, 2, 7]], [3, 1, 2, 8])):
        drafter = CacheDrafter(Shelf().put("mine", base, [("t", 0, tail)]))
        paths = paths_of(draft(drafter, [3, 1, 2]))
        assert paths[0] == (8,)
        assert (7,) in paths
        assert paths_of(draft(CacheDrafter(drafter._index, min_continuation=0), [3, 1, 2])) == [(8,)]


def test_a_namespace_is_drafted_from_if_the_sequence_may_read_it():
    shelf = Shelf().put("mine", [[1, 2, 3]]).put("group", [[1, 2, 4]]).put("public", (), [("d", 0, [1, 2, 5])])
    drafter = CacheDrafter(shelf)
    assert paths_of(draft(drafter, [1, 2])) == [(3,)]
    assert paths_of(draft(drafter, [1, 2], seq_id=2, readable=("group", "public", "unknown"))) == [(3,), (4,), (5,)]
    assert paths_of(draft(drafter, [1, 2], seq_id=3, namespace="public", readable=("public",))) == [(5,)]
    assert paths_of(draft(drafter, [1, 2], seq_id=4, reads_cache=False, readable=("public",))) == []
    assert paths_of(draft(drafter, [1, 2], seq_id=5, namespace="")) == []
    assert shelf.asked == ["mine", "mine", "group", "public", "unknown", "public", ""], "once a sequence"


def test_every_tail_is_left_also_when_a_round_fails():
    shelf = Shelf().put("mine", (), [("d", 0, [1, 2, 3])])
    drafter = CacheDrafter(shelf)
    draft(drafter, [1, 2])
    shelf.put("other", (), [("d", 0, [1, 2])])
    good = DraftContext(1, np.array([1, 2], np.int32), 0, 1, 4, SamplingParams(seed=0), "mine")
    bad = DraftContext(2, None, 0, 1, 4, SamplingParams(seed=0), "other")
    with pytest.raises(TypeError):
        drafter.propose([good, bad])
    for namespace in ("mine", "other"):
        tail = shelf.by_namespace[namespace].tail
        assert not tail._front.readers
        assert not tail._back.readers


@given(st.lists(texts, max_size=3), st.lists(texts, max_size=3), texts, st.lists(st.integers(1, 5), max_size=10))
@settings(max_examples=100)
def test_catching_up_beside_others_gives_the_draft_of_a_fresh_drafter(base, tail, tokens, steps):
    shelf = Shelf().put("mine", base, [(f"{row}", 0, text) for row, text in enumerate(tail)])
    drafter, known = CacheDrafter(shelf, floor=0.0), 0
    for step in [*steps, len(tokens)]:
        upto = min(known + step, len(tokens))
        if upto > known:
            draft(drafter, tokens[::-1], seq_id=2)
            tree = draft(drafter, tokens[:upto], known)
            assert content(tree) == content(draft(CacheDrafter(shelf, floor=0.0), tokens[:upto]))
            known = upto


@given(texts, st.lists(st.tuples(texts, st.integers(0, 2)), max_size=6))
@settings(max_examples=100)
def test_a_tail_that_grows_is_drafted_from_as_if_it_had_always_been_so(tokens, steps):
    shelf = Shelf().put("mine")
    drafter, size = CacheDrafter(shelf, floor=0.0), 1
    draft(drafter, tokens[:1])
    for number, (text, step) in enumerate(steps):
        shelf.add("mine", (f"{number % 3}", 20 * number, text))
        upto = min(size + step, len(tokens))
        tree = draft(drafter, tokens[:upto], size)
        assert content(tree) == content(draft(CacheDrafter(shelf, floor=0.0), tokens[:upto]))
        size = upto


def test_a_base_that_is_replaced_is_walked_anew_and_the_old_one_let_go():
    shelf = Shelf().put("mine", [[7, 1, 2, 3]])
    drafter = CacheDrafter(shelf)
    assert paths_of(draft(drafter, [7, 1, 2])) == [(3,)]
    before = drafter.memory_bytes()
    shelf.put("mine", [[7, 1, 2, 4, 5]])
    assert (paths_of(draft(drafter, [7, 1, 2], 3))[0], drafter.memory_bytes()) == ((4,), before)
    del shelf.by_namespace["mine"]
    assert paths_of(draft(drafter, [7, 1, 2], 3)) == []
    assert drafter.memory_bytes() < before
    drafter.forget(1)
    drafter.forget(99)
    assert drafter.memory_bytes() == 0


def test_a_sequence_that_was_restarted_is_walked_anew():
    drafter = CacheDrafter(Shelf().put("mine", [[1, 2, 3, 4], [5, 2, 6]]))
    assert (paths_of(draft(drafter, [1, 2]))[0], paths_of(draft(drafter, [5, 2], start=0))[0]) == ((3,), (6,))
    assert paths_of(draft(drafter, [1, 2], start=1))[0] == (3,)


def test_a_round_without_room_changes_nothing():
    drafter = CacheDrafter(Shelf().put("mine", [[1, 2, 3, 4, 5]]), floor=0.0)
    assert (paths_of(draft(drafter, [1, 2]))[0], len(draft(drafter, [1, 2, 3], 2, max_nodes=0))) == ((3,), 0)
    assert paths_of(draft(drafter, [1, 2, 3, 4], 3)) == [(5,)]


def test_knobs_bound_what_is_drafted():
    shelf = Shelf().put("mine", [[1, 2, 3, 4, 5, 6]], [("d", 0, [9, 8, 3, 4, 5, 6])])
    for options, context, most in (
        ({"len_threshold": 3}, [1, 2], 0),
        ({"len_bias": 1}, [1, 2], 0),
        ({"n_predicts": 2}, [1, 2], 2),
        ({"alpha": 1.0}, [1, 2], 3),
        ({"floor": 1.0}, [1, 2], 0),
        ({"floor": 1.0}, [9, 8], 0),
    ):
        drafter = create_drafter("cache", index=shelf, **{"floor": 0.0} | options)
        assert len(draft(drafter, context)) == most, options
