"""The phrase pool against a list of phrases in the order of their last insertion."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.lookahead.phrase_pool import PhrasePool
from paceline_testing.integrity import check_integrity

Entry = tuple[str, int, tuple[int, ...]]

entries = st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.tuples(st.integers(0, 2), st.integers(0, 1)))


class NaivePool:
    def __init__(self, per_token: int, max_phrases: int) -> None:
        self.per_token, self.max_phrases = per_token, max_phrases
        self.entries: list[Entry] = []  # oldest first

    def insert(self, entry: Entry) -> None:
        known = entry in self.entries
        if known:
            self.entries.remove(entry)
        rivals = [other for other in self.entries if other[:2] == entry[:2]]
        if not known and self.per_token >= 0 and len(rivals) == self.per_token:
            self.entries.remove(rivals[0])
        elif len(self.entries) == self.max_phrases:
            del self.entries[0]
        self.entries.append(entry)

    def newest(self, scope: str, token: int, count: int) -> list[tuple[int, ...]]:
        found = [phrase for *key, phrase in self.entries if key == [scope, token]]
        return found[::-1][:count]


@given(st.lists(entries, max_size=60), st.sampled_from([-1, 1, 2, 4]), st.integers(1, 12))
def test_it_holds_what_a_list_of_all_phrases_would(inserted, per_token, max_phrases):
    pool, naive = PhrasePool(2, per_token, max_phrases), NaivePool(per_token, max_phrases)
    for entry in inserted:
        pool.insert(*entry)
        naive.insert(entry)
        check_integrity(pool)
        assert len(pool) == len(naive.entries)
        for scope in "ab":
            for token in range(3):
                for count in (0, 1, 3, 12):
                    assert pool.newest(scope, token, count) == naive.newest(scope, token, count)


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 4))
def test_runs_are_every_token_with_the_tokens_behind_it(tokens, length):
    pool, one_by_one = PhrasePool(length, -1, 1000), PhrasePool(length, -1, 1000)
    pool.insert_runs("", tokens)
    for begin in range(len(tokens) - length):
        one_by_one.insert("", tokens[begin], tuple(tokens[begin + 1 : begin + 1 + length]))
    assert len(pool) == len(one_by_one)
    for token in range(4):
        assert pool.newest("", token, 1000) == one_by_one.newest("", token, 1000)


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=6), st.integers(1, 4))
def test_a_text_that_comes_in_parts_is_learnt_as_a_whole(parts, length):
    pool, whole = PhrasePool(length, -1, 1000), PhrasePool(length, -1, 1000)
    text: list[int] = []
    for part in parts:
        text += part
        pool.insert_text("", np.array(text, np.int32), len(part))
    whole.insert_runs("", text)
    for token in range(4):
        assert pool.newest("", token, 1000) == whole.newest("", token, 1000)


def test_of_a_long_text_only_the_end_is_learnt():
    pool = PhrasePool(2, 1, 1 << 20)
    pool.insert_text("", np.arange(5000, dtype=np.int32), 5000)
    assert (len(pool), pool.newest("", 4997, 1)) == (1024, [(4998, 4999)])


def test_a_phrase_of_another_length_is_refused():
    pool = PhrasePool(3, 5, 10)
    with pytest.raises(ValueError, match="a phrase has 2 tokens; those of this pool have 3"):
        pool.insert("", 1, (2, 3))
    assert len(pool) == 0
