"""The largest logits of rows, against sorting them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.sampling.top_tokens import argmax, most_probable


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 4),
    width=st.sampled_from([1, 2, 127, 128, 129, 700]),
    count=st.integers(1, 12),
    values=st.sampled_from([2, 5, 10**6]),  # few are many equals
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
def test_they_come_in_order_and_of_equals_the_lowest_column_first(rows, width, count, values, dtype, seed):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(-values, values, (rows, width)) / 7).to(dtype)
    exact = logits.double().numpy()
    order = np.lexsort((np.broadcast_to(np.arange(width), exact.shape), -exact))[:, :count]
    ids, probs = most_probable(logits, count)
    assert ids.tolist() == order.tolist()
    probabilities = np.exp(exact - exact.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    np.testing.assert_allclose(probs.numpy(), np.take_along_axis(probabilities, order, 1), rtol=1e-4, atol=1e-30)
    assert argmax(logits).tolist() == order[:, 0].tolist()


def test_masked_logits_have_no_probability_and_views_are_read_right():
    logits = torch.full((2, 300), -torch.inf)
    logits[0, 200], logits[1, 7], logits[1, 250] = 3.0, 3.0, 3.0
    ids, probs = most_probable(logits, 3)
    assert ids.tolist() == [[200, 0, 1], [7, 250, 0]]
    assert probs.tolist() == [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    assert argmax(logits.repeat(2, 2)[::2, :300]).tolist() == [200, 200]


def test_zeros_of_either_sign_are_equal():
    logits = torch.full((2, 300), -1.0)
    logits[:, 140], logits[:, 150], logits[:, 290] = -0.0, 0.0, -0.0
    logits[1, 7] = -1e-45
    ids, probs = most_probable(logits, 4)
    assert ids.tolist() == [[140, 150, 290, 0], [140, 150, 290, 7]]
    assert probs[0, 0] == probs[0, 1] == probs[0, 2]
    assert argmax(logits).tolist() == logits.argmax(dim=1).tolist() == [140, 140]


@pytest.mark.parametrize("number", [torch.nan, -torch.nan, torch.inf])
def test_rows_that_are_no_numbers_give_columns_all_the_same(number):
    logits = torch.full((2, 200), number)
    logits[1] = torch.arange(200)
    assert 0 <= argmax(logits)[0] < 200
    assert argmax(logits)[1] == 199
    assert most_probable(logits, 4)[0][1].tolist() == [199, 198, 197, 196]
