"""Processing of logits agrees with plain Python and with transformers, and leaves its input and other rows alone."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from actors.messages import SamplingParams
from actors.sampling.processors import process_logits
from actors.sampling.rows import RowSampling, rows_for
from actors.sampling.sequence_sampling import SequenceSampling

VOCAB = 24


def rows_of(num_rows: int, params: SamplingParams, committed: list[int] | None = None, prompt: int = 0) -> RowSampling:
    sequence = SequenceSampling(params, prompt)
    sequence.extend(np.array(committed or [], np.int64))
    empty = [np.empty(0, np.int64)] * num_rows
    return rows_for([sequence], np.zeros(num_rows, np.int64), np.arange(num_rows), empty)


def oracle(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The processing order in plain Python, one token at a time, in float64."""
    scores = list(logits)
    for token, score in enumerate(scores):
        if token in prompt or token in output:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        if token in output:
            score -= params.presence_penalty + params.frequency_penalty * output.count(token)
        score += sum(bias for biased, bias in params.logit_bias if biased == token)
        scores[token] = score
    if params.temperature <= 1e-6:
        return scores
    scores = [score / params.temperature for score in scores]
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    peak = scores[order[0]]
    weights = [math.exp(scores[token] - peak) for token in order]
    kept, before = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        share = before / sum(weights)
        if params.top_p < 1.0:
            assume(abs(share - params.top_p) > 1e-6)  # a cut within rounding of the limit may fall either way
        if params.min_p > 0.0:
            assume(not math.isclose(weight, params.min_p, rel_tol=1e-5))
        if not kept or ((params.top_p >= 1.0 or share < params.top_p) and weight >= params.min_p):
            kept.append(token)
        before += weight
    return [score if token in kept else -math.inf for token, score in enumerate(scores)]


# Logits on a coarse grid, so that ties are frequent.
logit_lists = st.lists(st.integers(-24, 24).map(lambda value: value / 4), min_size=VOCAB, max_size=VOCAB)
token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=12)
all_params = st.builds(
    SamplingParams,
    seed=st.just(1),
    temperature=st.sampled_from([0.0, 1e-6, 0.25, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 10, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.31, 0.87, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.013, 0.33, 0.97]),
    presence_penalty=st.sampled_from([0.0, 0.3, -0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.2, -0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.lists(st.tuples(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.0, 2.5])), max_size=3).map(
        tuple
    ),
)


@given(logit_lists, all_params, token_lists, token_lists)
def test_processing_equals_plain_python_ties_included(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> None:
    expected = oracle(logits, params, prompt, output)
    rows = rows_of(1, params, prompt + output, len(prompt))
    processed = process_logits(torch.tensor([logits]), rows)[0]
    # Sums of penalties in float32 can make or break a tie that float64 sees the other way round.
    distinct = sorted(value for value in expected if value > -math.inf)
    assume(all(gap == 0 or gap > 1e-4 for gap in np.diff(distinct)))
    assert processed.dtype == torch.float32
    assert (processed > -math.inf).tolist() == [value > -math.inf for value in expected]
    finite = processed > -math.inf
    assert processed[finite].tolist() == pytest.approx([value for value in expected if value > -math.inf], abs=1e-4)


@given(st.lists(logit_lists, min_size=1, max_size=6), st.lists(all_params, min_size=6, max_size=6), token_lists)
def test_a_row_is_processed_to_the_same_bits_in_any_company(
    logits: list[list[float]], params: list[SamplingParams], output: list[int]
) -> None:
    sequences = [SequenceSampling(part, 0) for part in params]
    for sequence in sequences:
        sequence.extend(np.array(output, np.int64))
    count = len(logits)
    paths = [np.array(output[:row]) for row in range(count)]
    rows = rows_for(sequences, np.arange(count), np.arange(count), paths)
    table = torch.tensor(logits)
    before = table.clone()
    together = process_logits(table, rows)
    assert torch.equal(table, before)
    for row in range(count):
        index = np.array([row])
        assert torch.equal(process_logits(table[row : row + 1], rows.take(index))[0], together[row])
        fresh = rows_for(sequences, index, index, [paths[row]])
        assert torch.equal(process_logits(table[row : row + 1], fresh)[0], together[row])


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"temperature": 0.7}, TemperatureLogitsWarper(0.7)),
        ({"top_k": 7}, TopKLogitsWarper(7)),
        ({"top_p": 0.9}, TopPLogitsWarper(0.9)),
        ({"top_p": 0.3}, TopPLogitsWarper(0.3)),
        ({"min_p": 0.05}, MinPLogitsWarper(0.05)),
    ],
)
def test_processing_agrees_with_the_warpers_of_transformers(params: dict[str, Any], warper: Any) -> None:
    logits = torch.randn(200, 500, generator=torch.Generator().manual_seed(1)) * 3
    processed = process_logits(logits, rows_of(200, SamplingParams(seed=0, **params)))
    assert torch.allclose(processed, warper(None, logits.clone()), rtol=1e-6)


def test_all_warpers_in_a_row_agree_with_transformers() -> None:
    logits = torch.randn(200, 500, generator=torch.Generator().manual_seed(2)) * 3
    expected = logits.clone()
    for warper in (TemperatureLogitsWarper(1.3), TopKLogitsWarper(60), TopPLogitsWarper(0.8), MinPLogitsWarper(0.04)):
        expected = warper(None, expected)
    params = SamplingParams(seed=0, temperature=1.3, top_k=60, top_p=0.8, min_p=0.04)
    processed = process_logits(logits, rows_of(200, params))
    assert torch.allclose(processed, expected, rtol=1e-6)
    assert (processed > -math.inf).sum(dim=-1).unique().numel() > 1  # the filters did something, not all the same


def test_the_repetition_penalty_agrees_with_transformers() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(3)) * 3
    tokens = [3, 4, 3, 499, 0, 17]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits.clone())
    rows = rows_of(1, SamplingParams(seed=0, repetition_penalty=1.7), tokens, prompt=4)
    assert torch.equal(process_logits(logits, rows), expected)


def test_equal_logits_are_kept_in_column_order() -> None:
    logits = torch.zeros(1, 10)
    kept = process_logits(logits, rows_of(1, SamplingParams(seed=0, top_k=3)))[0] == 0
    assert kept.tolist() == [True] * 3 + [False] * 7
    kept = process_logits(logits, rows_of(1, SamplingParams(seed=0, top_p=0.45)))[0] == 0
    assert kept.tolist() == [True] * 5 + [False] * 5


def test_top_p_keeps_the_token_that_crosses_the_limit_and_never_less_than_one() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for top_p, count in ((0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1e-12, 1), (0.0, 1)):
        processed = process_logits(logits, rows_of(1, SamplingParams(seed=0, top_p=top_p)))
        assert (processed > -math.inf).sum() == count, top_p


def test_greedy_rows_keep_every_logit_beside_rows_that_are_cut() -> None:
    greedy = SequenceSampling(SamplingParams(seed=0, temperature=0.0, top_k=1, top_p=0.1, min_p=0.9), 0)
    hot = SequenceSampling(SamplingParams(seed=0, temperature=0.5, top_k=1), 0)
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(4))
    processed = process_logits(logits, rows_for([greedy, hot], np.array([0, 1, 0]), np.arange(3)))
    assert torch.equal(processed[[0, 2]], logits[[0, 2]])
    assert (processed[1] > -math.inf).sum() == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype_becomes_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(5)).to(dtype)
    processed = process_logits(logits, rows_of(2, SamplingParams(seed=0, temperature=0.0)))
    assert processed.dtype == torch.float32
    assert torch.equal(processed, logits.to(torch.float32))


def test_a_reduced_vocabulary_is_penalised_by_target_ids() -> None:
    params = SamplingParams(seed=0, presence_penalty=1.0, logit_bias=((7, 2.0), (1, 5.0), (10_000, 3.0)))
    rows = rows_of(1, params, [9, 2, 800])
    processed = process_logits(torch.zeros(1, 4), rows, torch.tensor([9, 7, 3, 50]))
    assert processed[0].tolist() == [-1.0, 2.0, 0.0, 0.0]  # tokens 1, 2, 800 and 10,000 have no column


def test_rows_and_logits_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="3 rows; the sampling parameters have 2"):
        process_logits(torch.zeros(3, 4), rows_of(2, SamplingParams(seed=0)))


def test_a_row_that_is_masked_all_over_stays_so() -> None:
    rows = rows_of(1, SamplingParams(seed=0, top_k=2, top_p=0.5, min_p=0.1))
    assert (process_logits(torch.full((1, 5), -math.inf), rows) == -math.inf).all()
