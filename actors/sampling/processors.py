"""Logits processing: penalties, bias, temperature, top-k, top-p, min-p, in that order.

No reduction depends on the number of rows, and the masses that top-p sums are integers, so the kept tokens depend
neither on other rows nor on the order of summation.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from actors.sampling.rows import RowSampling

_MASS_SCALE = float(1 << 40)  # the likeliest token's mass; masses below 1 become 0. Sums fit int64.


def process_logits(logits: Tensor, rows: RowSampling, token_ids: Tensor | None = None) -> Tensor:
    """Processed logits, float32 [R, V], on the device of the input, which is not modified. Masked entries are -inf.

    logits: [R, V], any floating dtype. token_ids: int64 [V], the target's id of each column when the vocabulary is
    reduced. Equal logits count in column order. At least the likeliest token is kept. Nucleus (top-p) after Holtzman
    et al. 2020, which keeps the token that crosses the limit; min-p after Nguyen et al. 2024. Rows without temperature
    get penalties and bias only.
    """
    if len(logits) != len(rows):
        raise ValueError(f"logits has {len(logits)} rows; the sampling parameters have {len(rows)}")
    scores = adjust_logits(logits, rows, token_ids)
    if (rows.temperature != 1.0).any():
        scores.div_(torch.from_numpy(rows.temperature).to(scores.device).unsqueeze(-1))
    truncated = np.flatnonzero(rows.truncates)
    if len(truncated) == len(rows) > 0:
        return _truncate(scores, rows)
    if len(truncated) > 0:
        index = torch.from_numpy(truncated).to(scores.device)
        scores[index] = _truncate(scores[index], rows.take(truncated))
    return scores


def adjust_logits(logits: Tensor, rows: RowSampling, token_ids: Tensor | None = None) -> Tensor:
    """Penalties and bias only; a float32 copy, [R, V]. Arguments as for `process_logits`."""
    scores = logits.to(torch.float32, copy=True)
    if not rows.adjusts.any():
        return scores
    width = scores.shape[-1]
    columns = columns_of(rows.adjustments["token"], width, None if token_ids is None else token_ids.cpu().numpy())
    for begin, end in (("begin", "end"), ("own_begin", "own_end")):
        begins = rows.records[begin].astype(np.int64)
        counts = rows.records[end] - begins
        places = np.arange(counts.sum()) + np.repeat(begins - counts.cumsum() + counts, counts)
        row_index = np.repeat(np.arange(len(rows)), counts)
        present = columns[places] >= 0
        places = places[present]
        where = _put(row_index[present], scores.device), _put(columns[places], scores.device)
        divisor, subtrahend, bias = (
            _put(rows.adjustments[field][places], scores.device) for field in ("divisor", "subtrahend", "bias")
        )
        before = logits[where].to(torch.float32)
        scores[where] = torch.where(before > 0, before / divisor, before * divisor) - subtrahend + bias
    return scores


def _put(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def columns_of(tokens: np.ndarray, num_columns: int, token_ids: np.ndarray | None) -> np.ndarray:
    """The column of each token (int [N]), -1 for a token that has none. token_ids: int64 [num_columns], the token of
    each column; None: its index."""
    if token_ids is None:
        return np.where((tokens >= 0) & (tokens < num_columns), tokens, -1)
    table = np.full(max(int(token_ids.max(initial=-1)), int(tokens.max())) + 1, -1, np.int64)
    table[token_ids] = np.arange(num_columns)
    return np.where(tokens >= 0, table[tokens], -1)


def masses(scores: Tensor, peak: Tensor) -> Tensor:
    """Unnormalised probabilities as integers: int64, of the shape of `scores`; `peak` (broadcast) has mass 2**40."""
    # A fully masked row has a peak of -inf; the clamp avoids -inf - -inf, which is NaN.
    return torch.exp(scores - peak.clamp_min(torch.finfo(torch.float32).min)).mul_(_MASS_SCALE).to(torch.int64)


def _truncate(scores: Tensor, rows: RowSampling) -> Tensor:
    device, width = scores.device, scores.shape[-1]
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    top_k, top_p, min_log_ratio = (
        _put(rows.records[field], device).unsqueeze(-1) for field in ("top_k", "top_p", "min_log_ratio")
    )
    rank = torch.arange(width, device=device)
    keep = rank < torch.where(top_k > 0, top_k, width)
    peak = ordered[:, :1]
    mass = torch.where(keep, masses(ordered, peak), 0)
    up_to = mass.cumsum(dim=-1)
    limit = (top_p * up_to[:, -1:].to(torch.float64)).ceil_().to(torch.int64)
    keep &= (up_to - mass < limit) | (top_p >= 1.0)
    keep &= ordered - peak >= min_log_ratio
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter_(-1, order, keep)
    return scores.masked_fill(~kept, -torch.inf)
