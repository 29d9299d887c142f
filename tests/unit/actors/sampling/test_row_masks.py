"""Masks of rows of logits, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import FREE_ROW, TokenMasks
from actors.sampling.row_masks import mask_logits, mask_rows, row_masks

VOCAB = 77
WIDTH = 3


def allowed_of(masks: TokenMasks, row: int) -> np.ndarray:
    index, tokens = int(masks.index[row]), np.arange(VOCAB)
    if index == FREE_ROW:
        return np.ones(VOCAB, bool)
    if index < 0:
        return tokens == -1 - index
    words = masks.words.reshape(-1, WIDTH)[index]
    return np.array([words[token // 32] >> (token % 32) & 1 for token in tokens], bool)


@st.composite
def sequences(draw) -> list[tuple[TokenMasks | None, int]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found: list[tuple[TokenMasks | None, int]] = []
    for _ in range(draw(st.integers(1, 4))):
        rows, distinct = int(rng.integers(1, 5)), int(rng.integers(0, 4))
        words = rng.integers(-(2**31), 2**31, distinct * WIDTH, np.int32)
        index = rng.integers(-VOCAB, max(distinct, 1) if distinct else 0, rows + int(rng.integers(0, 3)), np.int32)
        index[rng.random(len(index)) < 0.3] = FREE_ROW
        found.append((TokenMasks(words, index) if rng.random() < 0.7 else None, rows))
    return found


@settings(max_examples=100, deadline=None)
@given(sequences(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_logits_of_other_tokens_become_minus_infinity_and_the_rest_stays(
    cases: list[tuple[TokenMasks | None, int]], dtype: torch.dtype
) -> None:
    masks = row_masks([mask for mask, _ in cases], [rows for _, rows in cases], VOCAB)
    if all(mask is None for mask, _ in cases):
        assert masks is None
        return
    assert masks is not None
    logits = torch.randn(sum(rows for _, rows in cases), VOCAB).to(dtype)
    allowed = np.concatenate(
        [
            np.stack([np.ones(VOCAB, bool) if mask is None else allowed_of(mask, row) for row in range(rows)])
            for mask, rows in cases
        ]
    )
    expected = logits.masked_fill(~torch.from_numpy(allowed), -torch.inf)
    on_host = logits.clone()
    mask_rows(on_host, masks)
    assert torch.equal(on_host, expected)
    words = torch.from_numpy(masks.words if len(masks.words) else np.zeros((1, WIDTH), np.int32))
    for first, end in ((0, VOCAB), (0, 40), (40, VOCAB)):  # whole, and in two shards
        part = logits[:, first:end].clone()
        mask_logits(part, words, torch.from_numpy(masks.rows), first)
        assert torch.equal(part, expected[:, first:end])


@pytest.mark.parametrize(
    ("words", "index"),
    [(np.zeros(4, np.int32), np.zeros(2, np.int32)), (np.zeros(3, np.int32), np.array([0, 1], np.int32)),
     (np.zeros(3, np.int32), np.zeros(1, np.int32)), (np.zeros(0, np.int32), np.array([-1, -1 - VOCAB], np.int32)),
     (np.zeros(0, np.int32), np.array([-1, FREE_ROW + 1], np.int32))],
)  # fmt: skip
def test_masks_that_do_not_fit_are_refused(words: np.ndarray, index: np.ndarray) -> None:
    with pytest.raises(ValueError, match="2 rows of 77 tokens"):
        row_masks([TokenMasks(words, index)], [2], VOCAB)
