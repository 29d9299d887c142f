"""Texts made of target predictions after rejected draft nodes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.router.discarded import MAX_COMMITTED, MAX_GUESSED, MAX_TEXTS, discarded_texts

SCRIPT = [3 + 7 * position % 97 for position in range(200)]


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def texts_of(found: np.ndarray) -> list[list[int]]:
    assert found.dtype == np.int32
    assert not len(found) or found[-1] == -1
    texts: list[list[int]] = [[]]
    for token in found.tolist():
        if token == -1:
            texts.append([])
        else:
            texts[-1].append(token)
    return texts[:-1]


@pytest.mark.parametrize(
    ("text", "path", "parents", "likeliest", "texts"),
    [
        # 1 2 3, drafted 50 51 52, refused at once: 4 comes instead.
        ([1, 2, 3, 4], [], [-1, 0, 1], [4, 5, 6, 7], [[1, 2, 3, 4, 5, 6, 7]]),
        # 1 2 3, drafted 4 50 51, of which 4 is right: 5 comes behind it.
        ([1, 2, 3, 4, 5], [0], [-1, 0, 1], [4, 5, 6, 7], [[1, 2, 3, 4, 5, 6, 7]]),
        # A draft that was all right, and none.
        ([1, 2, 3, 4], [0, 1], [-1, 0], [2, 3, 4], []),
        ([1, 2], [], [], [2], []),
        # Two chains from the root, of one and of three nodes, and a third one that begins like the second.
        ([1, 9], [], [-1, -1, 1, 2, -1], [9, 20, 30, 31, 32, 30], [[1, 9, 30, 31, 32], [1, 9, 20]]),
        # 5 6 7 is accepted; 50 51 stood beside 6.
        ([1, 5, 6, 7, 8], [0, 1, 2], [-1, 0, 1, 0, 3], [5, 6, 7, 8, 60, 61], [[1, 5, 6, 60, 61]]),
    ],
)
def test_every_refused_path_is_told_once_behind_what_was_committed_the_deepest_first(
    text, path, parents, likeliest, texts
):
    num_before = len(text) - len(path) - 1
    assert texts_of(discarded_texts(int32(text), num_before, path, int32(parents), int32(likeliest))) == texts


def test_long_paths_and_many_are_cut():
    count = 40
    text = int32([*range(100, 100 + count), 7])
    chain = discarded_texts(text, count, [], int32(list(range(-1, count - 1))), int32(list(range(count + 1))))
    assert texts_of(chain) == [[*text[-MAX_COMMITTED:].tolist(), *range(1, 1 + MAX_GUESSED)]]
    fan = discarded_texts(text, count, [], int32([-1] * count), int32(list(range(count + 1))))
    assert [found[-1] for found in texts_of(fan)] == list(range(1, 1 + MAX_TEXTS))


@st.composite
def judged_trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """(parents, accepted nodes in order)"""
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 30)))]
    path: list[int] = []
    node = draw(st.integers(-1, len(parents) - 1))
    while node != -1:
        path.insert(0, node)
        node = parents[node]
    return parents, path


@given(judged_trees(), st.integers(1, 40))
def test_of_a_target_whose_words_depend_on_the_place_alone_every_text_is_a_part_of_its_answer(judged, num_before):
    """However wrong the drafts were."""
    parents, path = judged
    depths = [0]
    for parent in parents:
        depths.append(depths[1 + parent] + 1)
    likeliest = int32([SCRIPT[num_before + depth] for depth in depths])
    text = SCRIPT[: num_before + len(path) + 1]
    texts = texts_of(discarded_texts(int32(text), num_before, path, int32(parents), likeliest))
    assert len(texts) <= MAX_TEXTS
    assert bool(texts) == (len(path) < len(parents))
    ends = [SCRIPT.index(found[-1]) for found in texts]
    for found, end in zip(texts, ends, strict=True):
        assert found == SCRIPT[end + 1 - len(found) : end + 1]
        assert end > num_before
        assert len(found) <= MAX_COMMITTED + MAX_GUESSED
        assert len(found) >= min(MAX_COMMITTED, num_before + 1) + 1
    if texts and max(depths) <= MAX_GUESSED:
        refused = [depth for node, depth in enumerate(depths[1:]) if node not in path]
        assert ends[0] == num_before + max(refused)
