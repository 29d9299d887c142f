"""Rows of logits of many shapes, and sampling parameters for them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from actors.messages import SamplingParams
from actors.records import addresses_of
from actors.sampling import sampler
from actors.sampling.rows import ROW, Paths, RowSampling, fill_records, rows_for, shared_ranges
from actors.sampling.sequence_sampling import ADJUSTMENT, SequenceSampling

HISTORY = np.array([3, 9, 9, 5, 77, 5, 2], np.int64)

params = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7, 40.0]),
    top_k=st.sampled_from([0, 0, 1, 7, 200, 100_000]),
    top_p=st.sampled_from([1.0, 1e-9, 0.5, 0.9, 0.999, 1.0 - 2.0**-53]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (9, -100.0), (700, 30.0), (5_000, 1.0))]),
)
TRUNCATING: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 40, "temperature": 0.7},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 1.4},
    {"top_p": 0.9, "logit_bias": ((3, 9.0), (4, 9.0))},
    {"min_p": 0.03},
    {"top_k": 300, "top_p": 0.9, "min_p": 0.001, "repetition_penalty": 1.3},
    {"top_k": 450, "top_p": 0.999999},
]


def rows_with(options: list[SamplingParams], *, first_position: int = 7) -> RowSampling:
    """A row of each of these, at successive positions, with ever longer paths."""
    sequences = [SequenceSampling(one, 3) for one in options]
    for sequence in sequences:
        sequence.extend(HISTORY)
    count = len(options)
    positions = np.arange(count) + first_position
    return rows_for(sequences, np.arange(count), positions, [HISTORY[:row] for row in range(count)])


def rows_of_table(
    sequences: list[SequenceSampling], row_sequence: np.ndarray, positions: np.ndarray, paths: Paths
) -> RowSampling:
    """As `rows_for`, for sequences whose adjustments are in an `AdjustmentTable`, as rounds on a device write them."""
    addresses = addresses_of(sequences)
    records, adjustments = np.empty(len(row_sequence), ROW), np.empty(len(paths.tokens), ADJUSTMENT)
    ranges, _ = shared_ranges(addresses, True)
    used = fill_records(
        addresses, ranges, True, row_sequence, positions, paths.tokens, paths.offsets, records, adjustments
    )
    return RowSampling(records, adjustments[:used])


def logits_of(
    shape: str, num_rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int | None = None
) -> Tensor:
    """[num_rows, width]; shape: of SHAPES. seed: None takes the width."""
    generator = torch.Generator().manual_seed(width if seed is None else seed)
    logits = torch.randn(num_rows, width, generator=generator) * 3
    if shape == "tied":
        logits = (logits * 0.7).round()
    elif shape == "masked":
        logits = torch.where(torch.rand(num_rows, width, generator=generator) < 0.97, -math.inf, logits)
    elif shape == "zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
    elif shape == "nothing allowed":
        logits = torch.full_like(logits, -math.inf)
    elif shape == "flat":
        logits = logits * 1e-4
    elif shape == "large":
        logits = logits * 50 + 1_000
    return logits.to(dtype)


SHAPES = ["usual", "tied", "masked", "zeros", "nothing allowed", "flat", "large"]
shapes, dtypes = st.sampled_from(SHAPES), st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def by_tensors(logits: Tensor, rows: RowSampling, token_ids: Tensor | None = None) -> Tensor:
    """Tokens, int64 [R], as tensor operations draw them from whole rows."""
    columns = sampler._sample_densely(logits, rows, token_ids)
    return columns if token_ids is None else token_ids[columns]
