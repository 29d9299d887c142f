"""Phrases and successors from the shared index are what stands in its documents, and of nobody else's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.drafters.contract import DraftContext
from actors.drafters.registry import create_drafters
from actors.messages import SamplingParams
from cache_service.automata.automata_index import Automata
from cache_service.automata.live_tail import LiveTail
from cache_service.automata.shared_phrases import SharedPhrases
from cache_service.automata.static_automaton import StaticAutomaton
from cache_service.automata.suffix_automaton import SEPARATOR, SuffixAutomaton
from paceline_testing.cache_stores import piece

VOCAB_SIZE = 50
texts = st.lists(st.integers(0, 4), min_size=1, max_size=15)


class Index:
    """Documents by namespace, some in the base and some in the tail."""

    def __init__(self, **documents):
        self.followed = []
        self.known = {}
        for namespace, (base, tail) in documents.items():
            automaton = SuffixAutomaton()
            for document in base:
                automaton.extend(np.array([*document, SEPARATOR], np.int32))
            live = LiveTail(VOCAB_SIZE)
            for row, document in enumerate(tail):
                live.add([piece(str(row), 0, document)])
            self.known[namespace] = Automata(StaticAutomaton.freeze(automaton) if base else None, 1, live, 2)

    def follow(self, namespace):
        self.followed.append(namespace)

    def automata(self, namespace):
        return self.known.get(namespace)


def behind(index, tokens, length=3, count=5, namespaces=("mine",)):
    return SharedPhrases(index).behind(namespaces, np.array(tokens, np.int32), length, count)


@settings(max_examples=60)
@given(
    base=st.lists(texts, max_size=4),
    tail=st.lists(texts, max_size=4),
    token=st.integers(0, 5),
    length=st.integers(1, 4),
    count=st.integers(1, 6),
)
def test_every_phrase_stands_behind_its_token_somewhere(base, tail, token, length, count):
    index = Index(mine=(base, tail), other=([[token, 40, 41]], []))
    found = behind(index, [token], length, count)
    assert len(found) <= count
    assert len(set(found)) == len(found)
    for phrase in found:
        assert 1 <= len(phrase) <= length
        whole = [token, *phrase]
        assert any(
            whole == text[begin : begin + len(whole)] for text in (*base, *tail) for begin in range(len(text))
        ), phrase
    has_any = any(token in text[:-1] for text in (*base, *tail))
    assert bool(found) == has_any


def test_what_follows_most_often_comes_first():
    texts = [[1, 2, 3, 4]] * 5 + [[1, 7, 8, 9]]
    for index in (Index(mine=(texts, [])), Index(mine=([], texts))):
        assert behind(index, [1])[0][:2] == (2, 3)
        assert (7,) in behind(index, [1]), "as far as it is likely enough"
        assert (behind(index, [7, 8]), behind(index, [1], namespaces=("other",))) == ([(9,)], [])
        assert behind(index, [1], namespaces=("other", "mine")) == behind(index, [1])


def draft(drafter, namespace="mine", **fields):
    tokens = np.array([9, 1], np.int32)
    context = DraftContext(1, tokens, 0, 2, 8, SamplingParams(seed=1), namespace, **fields)
    (tree,) = drafter.propose([context])
    assert tree.is_valid(VOCAB_SIZE)
    assert len(tree) <= 8
    assert tree.confidence[tree.parents < 0].sum() <= 1 + 1e-5 or drafter.name == "lookahead"
    return tree.token_ids.tolist()


@pytest.mark.parametrize("name", ["token_recycling", "lookahead"])
def test_drafters_read_what_the_context_may_read(name):
    index = Index(mine=([[1, 2, 3, 4]] * 3, []), other=([[1, 5, 6, 7]] * 3, []))

    def new():
        return create_drafters((name,), index=index)[name]

    assert 2 in draft(new())
    assert 5 not in draft(new())
    assert 5 in draft(new(), readable=("other",))
    assert draft(new(), namespace="nobody") == draft(new(), reads_cache=False) == []
    assert draft(create_drafters((name,))[name]) == []
    assert set(index.followed) == {"mine", "other", "nobody"}
    drafter = new()
    draft(drafter)
    assert drafter.memory_bytes() <= new().memory_bytes() + 1000, "nothing of the index is kept"
