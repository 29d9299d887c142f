"""Masks of rows of logits, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import FREE_ROW, SamplingParams, TokenMasks
from actors.sampling.row_masks import RowMasks, mask_logits, mask_rows, row_masks
from actors.sampling.rows import rows_for
from actors.sampling.sampler import sample_tokens
from actors.sampling.sequence_sampling import SequenceSampling

VOCAB = 77
WIDTH = 3
_NO_PATH = np.empty(0, np.int32)


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


WAYS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 0.7, "top_p": 0.8, "top_k": 50, "min_p": 0.01},
    "penalties": {"temperature": 1.3, "repetition_penalty": 1.3, "logit_bias": ((5, 4.0), (2090, -3.0))},
    "greedy with penalties": {"temperature": 0.0, "presence_penalty": 1.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [70, 2100])  # below a wide vocabulary, and with a last word of 20 tokens
def test_draws_within_masks_are_draws_from_masked_logits(dtype: torch.dtype, size: int) -> None:
    """Several kinds of sampling and of masks in one batch, with equal logits."""
    rng = np.random.default_rng(size)
    width = -(-size // 32)
    shares = [1.0, 0.9, 0.5, 0.02, 0.0]  # of tokens that are allowed
    bits = np.stack([rng.random(32 * width) < share for share in shares])
    bits[1, 64:] = True  # whole words, too
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    places = [0, 1, 2, 3, 4, FREE_ROW, -1, -size]
    masks = RowMasks(words, np.array(places * len(WAYS), np.int32))
    states = [SequenceSampling(SamplingParams(seed, **way), 4) for seed, way in enumerate(WAYS.values())]
    for state in states:
        state.extend(np.arange(8))
    count = len(masks.rows)
    rows = rows_for(states, np.repeat(np.arange(len(states)), len(places)), np.arange(count) + 8, [_NO_PATH] * count)
    logits = (torch.from_numpy(rng.normal(0, 3, (count, size))).float() * 2).round().to(dtype) / 2
    masked = logits.clone()
    mask_rows(masked, masks)
    before = logits.clone()
    found = sample_tokens(logits, rows, masks=masks)
    assert found.tolist() == sample_tokens(masked, rows).tolist()
    assert torch.equal(logits, before)
    greedy = rows.take(np.arange(len(places)))
    first = RowMasks(words, masks.rows[: len(places)])
    assert sample_tokens(logits[: len(places)], greedy, masks=first).tolist() == found[: len(places)].tolist()
    assert found[6::8].tolist() == [0] * len(WAYS)
    assert found[7::8].tolist() == [size - 1] * len(WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_that_allows_one_token_is_not_read(way: str) -> None:
    state = SequenceSampling(SamplingParams(1, **WAYS[way]), 4)
    state.extend(np.arange(8))
    rows = rows_for([state], np.zeros(2, np.int64), np.array([8, 9]), [_NO_PATH] * 2)
    masks = RowMasks(np.zeros((0, 128), np.int32), np.array([-1 - 7, -1 - 4095], np.int32))
    assert sample_tokens(torch.full((2, 4096), torch.nan), rows, masks=masks).tolist() == [7, 4095]


def test_masks_of_a_reduced_vocabulary_are_those_of_its_tokens() -> None:
    """And a token that the vocabulary does not have may be the only one."""
    words = np.random.default_rng(0).integers(-(2**31), 2**31, WIDTH, np.int32)
    masks = RowMasks(words[None], np.array([0, FREE_ROW, -1 - 6, -1 - 7], np.int32))
    logits, token_ids = torch.randn(4, VOCAB), torch.arange(0, 60, 3)
    whole, reduced = logits.clone(), logits[:, token_ids].clone()
    mask_rows(whole, masks)
    mask_rows(reduced, masks, token_ids)
    assert torch.equal(reduced, whole[:, token_ids])
    assert (reduced[3] == -torch.inf).all()
    first = logits[:, :7].clone()
    mask_rows(first, masks)
    assert torch.equal(first, whole[:, :7])
