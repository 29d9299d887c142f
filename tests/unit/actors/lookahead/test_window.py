"""The lookahead window with toy models: what it asks for, and what it finds."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.draft_tree import depths_of
from actors.lookahead.token_trie import ROOT, TokenTrie
from actors.lookahead.window import LookaheadWindow

VOCAB = 97
TEXT = np.arange(10, 30, dtype=np.int32)

shapes = st.tuples(st.integers(1, 8), st.integers(2, 7))


def following(token: int) -> int:
    """What a model that looks at one token only says next."""
    return (token * 29 + 7) % VOCAB


@given(shapes, st.integers(0, 2**64 - 1))
def test_every_phrase_of_a_full_window_is_what_the_model_says_behind_its_key(shape, seed):
    width, level = shape
    window, last, found = LookaheadWindow(width, level, TEXT, seed), 5, []
    for step in range(level + 3):
        trie = TokenTrie()
        ends = window.add_to(trie, ROOT)
        assert len(ends) == len(window._base) + 1
        assert window.is_full == (step >= level - 2)
        found = window.advance(last, [following(trie.tokens[end] if end != ROOT else last) for end in ends])
        assert len(found) == (width if step >= level - 2 else 0)
        for column, (key, phrase) in enumerate(found):
            assert len(phrase) == level - 1
            assert list(phrase[1:]) == [following(token) for token in phrase[:-1]]
            # Column 0 began below a guess at the last token.
            assert phrase[0] == following(key) if column else key == last
        last = following(last)


@given(shapes, st.integers(0, 2**32))
def test_columns_hang_below_the_chain_of_row_0_and_grow_by_what_is_said_at_their_ends(shape, seed):
    width, level = shape
    window, fresh = LookaheadWindow(width, level, TEXT, seed), count(1000)
    sizes, said = [], []
    for _ in range(2 * level):
        trie = TokenTrie()
        before = trie.add(ROOT, [1, 2])
        ends = window.add_to(trie, before[-1])
        depths = depths_of(np.array(trie.parents))
        assert depths.max() == len(before) + window.depth
        rows = depths[ends] - len(before) - np.arange(len(ends))
        assert (rows == rows[0]).all()  # every column is as long, and begins one position behind the one before
        if said:
            kept = said[1:] if len(ends) < len(said) else said
            assert [trie.tokens[end] for end in ends] == kept or level == 2
        sizes.append(len(trie) - len(before))
        said = [next(fresh) for _ in ends]
        window.advance(2, said)
    assert max(sizes) == LookaheadWindow.most_nodes(width, level)


def test_it_begins_with_tokens_of_the_text_drawn_by_the_seed():
    def row(text: list[int], seed: int) -> list[int]:
        trie = TokenTrie()
        LookaheadWindow(8, 5, np.array(text, np.int32), seed).add_to(trie, ROOT)
        return trie.tokens

    assert row(TEXT.tolist(), 3) == row(TEXT.tolist(), 3) != row(TEXT.tolist(), 4)
    assert set(row(TEXT.tolist(), 3)) <= set(TEXT.tolist())
    assert len(row([7], 3)) == 8 + 5 - 3


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=8))
def test_a_trie_has_every_branch_once(branches):
    trie = TokenTrie()
    ends = [trie.add(ROOT, branch)[-1:] for branch in branches]
    prefixes = {tuple(branch[:end]) for branch in branches for end in range(1, len(branch) + 1)}
    tokens, parents = trie.arrays()
    assert len(trie) == len(prefixes)
    assert (parents < np.arange(len(trie))).all()
    for branch, end in zip(branches, ends, strict=True):
        node = end[0] if end else ROOT
        for token in branch[::-1]:
            assert trie.children(int(parents[node]))[token] == node
            assert tokens[node] == token
            node = int(parents[node])
        assert node == ROOT


@pytest.mark.parametrize(("width", "level", "nodes"), [(1, 2, 0), (5, 2, 4), (5, 5, 19), (20, 7, 119), (1, 5, 5)])
def test_the_most_nodes_of_a_window(width, level, nodes):
    assert LookaheadWindow.most_nodes(width, level) == nodes
