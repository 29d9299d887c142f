"""Tokens are argmax(process(logits) + noise): fast answers equal the formula, rows mind only themselves.

Covers `actors.sampling.race`, too.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.messages import SamplingParams
from actors.sampling import noise
from actors.sampling.processors import process_logits
from actors.sampling.rows import RowSampling
from actors.sampling.sampler import SequenceSampling, draft_with_probs, likeliest_tokens, rows_for, sample_tokens

WIDE = 4_096  # wide enough for the fast path
PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1.5},
    {"temperature": 1e-5},
    {"temperature": 50.0},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": WIDE - 1},
    {"top_k": 10 * WIDE},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 0.7},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 2000, "top_p": 0.99},
    {"temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": ((3, 4.0), (9, -100.0))},
    {"top_p": 0.8, "logit_bias": ((3, 30.0), (9, -100.0))},
]


def by_the_formula(logits: torch.Tensor, rows: RowSampling, token_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The definition, with noise for every token of every row."""
    ids = torch.arange(logits.shape[-1]) if token_ids is None else token_ids
    drawn = noise.gumbel(torch.from_numpy(rows.seeds), torch.from_numpy(rows.positions), ids)
    drawn[torch.from_numpy(~rows.is_hot)] = 0.0
    columns = (process_logits(logits, rows, token_ids) + drawn).argmax(dim=-1)
    return ids[columns]


def rows_of(num_rows: int, seed: int, history: np.ndarray, **params: Any) -> RowSampling:
    """Rows of one sequence at successive positions; row r has the first r tokens of the history as its path."""
    sequence = SequenceSampling(SamplingParams(seed=seed, **params), 3)
    sequence.extend(history)
    start = len(history)
    return rows_for(
        [sequence],
        np.zeros(num_rows, np.int64),
        np.arange(start, start + num_rows),
        [history[:row] for row in range(num_rows)],
    )


def logits_like(shape: str, num_rows: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(num_rows, width, generator=generator)
    if shape == "peaked":
        return logits * 6
    if shape == "flat":
        return logits * 0.01
    if shape == "tied":
        return (logits * 2).round().to(torch.bfloat16)
    if shape == "masked":
        return torch.where(torch.rand(num_rows, width, generator=generator) < 0.99, -math.inf, logits * 3)
    if shape == "shifted":
        return logits * 3 + 1_000.0
    return torch.zeros(num_rows, width)


@pytest.mark.parametrize("shape", ["peaked", "flat", "tied", "masked", "shifted", "equal"])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_fast_answer_equals_the_formula(params: dict[str, Any], shape: str) -> None:
    history = np.array([3, 9, 9, 5, 77, 5, 2], np.int64)
    logits = logits_like(shape, 24, WIDE)
    before = logits.clone()
    rows = rows_of(24, 2**63 + 5, history, **params)
    assert sample_tokens(logits, rows).tolist() == by_the_formula(logits, rows).tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9, "temperature": 1.2}, {"top_k": 300}], ids=str)
def test_the_fast_answer_equals_the_formula_at_full_vocabulary_size(params: dict[str, Any]) -> None:
    history = np.arange(5)
    for width in (49_152, 151_936):
        logits = logits_like("tied", 8, width).to(torch.float32) * 2
        rows = rows_of(8, 12345, history, **params)
        assert sample_tokens(logits, rows).tolist() == by_the_formula(logits, rows).tolist()


@settings(max_examples=60)
@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.sampled_from(PARAMS), min_size=2, max_size=6),
    st.sampled_from([WIDE, 64]),
    st.randoms(use_true_random=False),
)
def test_a_row_draws_the_same_token_alone_and_in_any_batch(
    seed: int, params: list[dict[str, Any]], width: int, random: Any
) -> None:
    sequences = [SequenceSampling(SamplingParams(seed=seed, **part), 0) for part in params]
    for sequence in sequences:
        sequence.extend(np.array([1, 2, 1, 9]))
    count = len(params)
    order = list(range(count))
    random.shuffle(order)
    logits = logits_like("tied", count, width)
    paths = [np.arange(row) for row in range(count)]
    positions = np.arange(count) * 13 + 4
    together = sample_tokens(logits, rows_for(sequences, np.arange(count), positions, paths))
    shuffled = sample_tokens(
        logits[order], rows_for(sequences, np.array(order), positions[order], [paths[row] for row in order])
    )
    assert shuffled.tolist() == together[order].tolist()
    for row in range(count):
        alone = rows_for([sequences[row]], np.array([0]), positions[row : row + 1], [paths[row]])
        assert sample_tokens(logits[row : row + 1], alone).tolist() == [together[row].item()]


@pytest.mark.parametrize("width", [64, WIDE])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_reduced_vocabulary_draws_what_the_full_one_draws_with_the_rest_masked(
    params: dict[str, Any], width: int
) -> None:
    generator = torch.Generator().manual_seed(7)
    token_ids = torch.randperm(3 * width, generator=generator)[:width].sort().values
    reduced = torch.randn(10, width, generator=generator) * 3
    full = torch.full((10, 3 * width), -math.inf)
    full[:, token_ids] = reduced
    rows = rows_of(10, 99, token_ids[:6].numpy(), **params)
    drawn = sample_tokens(reduced, rows, token_ids)
    assert drawn.tolist() == sample_tokens(full, rows).tolist()
    assert drawn.tolist() == by_the_formula(reduced, rows, token_ids).tolist()


@pytest.mark.parametrize("width", [10, WIDE])
def test_equal_greedy_logits_go_to_the_lowest_column(width: int) -> None:
    logits = torch.zeros(2, width, dtype=torch.bfloat16)
    logits[:, [4, 7]] = 2.0
    plain, biased = {"temperature": 0.0}, {"temperature": 0.0, "logit_bias": ((7, 0.0), (2, 1.0))}
    for params in (plain, biased):
        assert sample_tokens(logits, rows_of(2, 0, np.empty(0, np.int64), **params)).tolist() == [4, 4]


@pytest.mark.parametrize("width", [10, WIDE])
def test_a_row_without_any_allowed_token_still_has_an_answer(width: int) -> None:
    logits = torch.full((2, width), -math.inf)
    for params in ({}, {"top_p": 0.5}, {"top_k": 3}):
        assert sample_tokens(logits, rows_of(2, 0, np.empty(0, np.int64), **params)).tolist() == [0, 0]


def test_only_rows_of_plain_argmax_make_a_batch_greedy() -> None:
    none = np.empty(0, np.int64)
    assert rows_of(2, 0, none, temperature=0.0, top_p=0.5).is_greedy
    assert rows_of(2, 0, none, temperature=1e-6).is_greedy
    assert not rows_of(2, 0, none, temperature=1e-3).is_greedy
    assert not rows_of(2, 0, none, temperature=0.0, logit_bias=((1, 1.0),)).is_greedy
    assert rows_of(2, 0, none, temperature=0.0, presence_penalty=1.0).take(np.array([0])).is_greedy  # nothing occurred
    assert not rows_of(2, 0, np.arange(5), temperature=0.0, presence_penalty=1.0).is_greedy


def adjustments_of(sequence: SequenceSampling) -> tuple[np.ndarray, ...]:
    """Tokens, divisors, subtrahends and biases of a row after the committed tokens."""
    rows = rows_for([sequence], np.zeros(1, np.int64), np.zeros(1, np.int64), [np.zeros(0, np.int64)])
    return tuple(rows.adjustments[name] for name in ("token", "divisor", "subtrahend", "bias"))


penalties = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.75]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    logit_bias=st.sampled_from([(), ((1, 0.5), (6, -2.0))]),
)


@given(
    st.lists(st.integers(0, 9), max_size=60), st.integers(0, 60), penalties, st.lists(st.integers(1, 7), max_size=20)
)
def test_telling_tokens_in_pieces_equals_telling_them_at_once_and_counting_by_hand(
    tokens: list[int], num_prompt: int, params: SamplingParams, pieces: list[int]
) -> None:
    at_once, piecewise = SequenceSampling(params, num_prompt), SequenceSampling(params, num_prompt)
    at_once.extend(np.array(tokens, np.int32))
    rest = np.array(tokens, np.int32)
    for piece in pieces:
        piecewise.extend(rest[:piece])
        rest = rest[piece:]
    piecewise.extend(rest)
    assert at_once.num_tokens == piecewise.num_tokens == len(tokens)

    output = tokens[num_prompt:]
    bias = dict(params.logit_bias)
    for sequence in (at_once, piecewise):
        ids, divisor, subtrahend, added = adjustments_of(sequence)
        assert len(set(ids.tolist())) == len(ids)
        found = {token: (d, s, b) for token, d, s, b in zip(ids.tolist(), divisor, subtrahend, added, strict=True)}
        for token in range(10):
            seen = sequence.uses_history and token in tokens
            count = output.count(token)
            assert found.get(token, (1.0, 0.0, 0.0)) == pytest.approx(
                (
                    params.repetition_penalty if seen else 1.0,
                    params.presence_penalty * (count > 0) + params.frequency_penalty * count,
                    bias.get(token, 0.0),
                )
            )


def test_a_sequence_without_penalties_remembers_no_tokens() -> None:
    sequence = SequenceSampling(SamplingParams(seed=1, top_p=0.9, logit_bias=((5, 1.0),)), 4)
    sequence.extend(np.arange(100_000))
    assert sequence.num_tokens == 100_000
    assert not sequence.uses_history
    assert adjustments_of(sequence)[0].tolist() == [5]


def test_asking_for_rows_without_paths_is_refused_where_penalties_need_them() -> None:
    sequence = SequenceSampling(SamplingParams(seed=1, presence_penalty=0.5), 0)
    with pytest.raises(ValueError, match="paths is None"):
        rows_for([sequence], np.zeros(1, np.int64), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="paths has 2 entries"):
        rows_for([sequence], np.zeros(1, np.int64), np.zeros(1, np.int64), [np.zeros(0)] * 2)


def test_rows_and_logits_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="3 rows; the sampling parameters have 2"):
        sample_tokens(torch.zeros(3, 5), rows_of(2, 0, np.empty(0, np.int64)))


@pytest.mark.parametrize("k", [1, 4, 1000])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_draft_distributions_are_the_processed_ones_cut_to_k_and_normalised(params: dict[str, Any], k: int) -> None:
    width = 50
    token_ids = torch.arange(width) * 2 + 1
    logits = logits_like("tied", 12, width).to(torch.float32)
    rows = rows_of(12, 4, np.array([3, 9, 9]), **params)
    tokens, ids, probs = draft_with_probs(logits, rows, k, token_ids)
    assert ids.shape == probs.shape == (12, min(k, width))
    expected = process_logits(logits, rows, token_ids).to(torch.float64)
    for row in range(12):
        order = sorted(range(width), key=lambda column, row=row: (-expected[row, column].item(), column))
        assert ids[row].tolist() == token_ids[order[:k]].tolist()
        head = expected[row, order[:k]].softmax(dim=-1)
        if not rows.is_hot[row]:
            head = torch.eye(len(head), dtype=torch.float64)[0]
        assert probs[row].tolist() == pytest.approx(head.tolist(), abs=1e-6)
        assert probs[row, ids[row] == tokens[row]].item() > 0.0


def test_drafts_with_probabilities_of_no_token_are_refused() -> None:
    with pytest.raises(ValueError, match="k is 0"):
        draft_with_probs(torch.zeros(1, 4), rows_of(1, 0, np.empty(0, np.int64)), 0)


@pytest.mark.parametrize("shape", ["peaked", "flat", "masked", "shifted"])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_likeliest_token_is_the_one_that_is_sampled(params: dict[str, Any], shape: str) -> None:
    rows = rows_of(24, 99, np.array([3, 9, 9, 5, 77, 5, 2], np.int64), **params)
    logits = logits_like(shape, 24, WIDE)
    tokens, probs = likeliest_tokens(logits, rows, 4)
    assert torch.equal(tokens[:, 0], sample_tokens(logits, rows))
    assert all(len(set(row)) == 4 for row in tokens.tolist())
    assert (probs.diff(dim=-1) <= 0).all()
    assert (probs >= 0).all()
    assert (probs.sum(dim=-1) <= 1 + 1e-4).all()


def test_the_likeliest_tokens_of_a_reduced_vocabulary_are_target_ids() -> None:
    ids = torch.arange(2, 50, 3)
    logits = logits_like("peaked", 8, len(ids))
    rows = rows_of(8, 5, np.arange(3), temperature=0.9)
    whole = torch.full((8, 50), -math.inf)
    whole[:, ids] = logits
    for few, all_of_them in zip(likeliest_tokens(logits, rows, 3, ids), likeliest_tokens(whole, rows, 3), strict=True):
        torch.testing.assert_close(few, all_of_them)
    assert likeliest_tokens(logits, rows, 99, ids)[0].sort().values.tolist() == [ids.tolist()] * 8
    with pytest.raises(ValueError, match="k is 0"):
        likeliest_tokens(logits, rows, 0, ids)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_probabilities_say_how_often_a_model_with_other_logits_draws_the_token(temperature: float) -> None:
    """Others: the same logits with an error of scale 1, which is what makes greedy draws of them the softmax."""
    logits, trials = logits_like("flat", 1, 12) * 120, 40_000
    tokens, probs = likeliest_tokens(logits, rows_of(1, 8, np.arange(3), temperature=temperature), 4)
    uniform = torch.rand(trials, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    others = logits - torch.log(-torch.log(uniform))
    one = SequenceSampling(SamplingParams(seed=8, temperature=temperature), 3)
    drawn = sample_tokens(others, rows_for([one], np.zeros(trials, np.int64), np.full(trials, 3)))
    seen = [(drawn == token).double().mean().item() for token in tokens[0]]
    assert seen == pytest.approx(probs[0].tolist(), abs=0.015)
    assert probs[0, 1] > 0.01  # there is something to be right about
