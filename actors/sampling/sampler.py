"""From rows of logits to tokens: argmax(process(logits) + noise(seed, position, token)).

The token is a function of seed, position and logits alone, so output for a seed is the same with any draft and in any
batch. At temperature 0 the noise is left out.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from actors.sampling import device_sampling, noise
from actors.sampling.processors import adjust_logits, process_logits
from actors.sampling.race import contenders, support
from actors.sampling.row_masks import RowMasks, allowed_columns, argmax_within, mask_rows
from actors.sampling.rows import RowSampling, rows_for
from actors.sampling.sequence_sampling import SequenceSampling
from actors.sampling.top_tokens import argmax, most_probable

__all__ = ["RowSampling", "SequenceSampling", "draft_with_probs", "likeliest_tokens", "rows_for", "sample_tokens"]

_MIN_RACE_WIDTH = 2048  # columns from which a pass per row is cheaper than noise for all tokens of all rows


def sample_tokens(
    logits: Tensor, rows: RowSampling, token_ids: Tensor | None = None, masks: RowMasks | None = None
) -> Tensor:
    """One token per row, int64 [R], on the device of the logits; equal sums go to the lowest column.

    logits: [R, V], any floating dtype, not modified. token_ids: int64 [V] maps the columns of a reduced vocabulary to
    target ids; noise, penalties and bias then act on target ids and target ids are returned. masks: of the rows, for
    a vocabulary that is not reduced; a row that allows one token is that token. A row's token does not depend on the
    other rows. Raises ValueError when rows and logits differ in number.
    """
    if len(logits) != len(rows):
        raise ValueError(f"logits has {len(logits)} rows; the sampling parameters have {len(rows)}")
    logits = logits.detach()
    if masks is not None and (logits.device.type != "cpu" or logits.shape[-1] < _MIN_RACE_WIDTH):
        logits = logits.clone()
        mask_rows(logits, masks)
        masks = None
    if rows.is_greedy:
        columns = argmax(logits) if masks is None else torch.from_numpy(argmax_within(logits, masks))
    elif _has_kernels(logits.device):
        return device_sampling.draw(logits, rows, token_ids).tokens
    elif logits.device.type == "cpu" and logits.shape[-1] >= _MIN_RACE_WIDTH:
        columns = _sample_by_race(logits, rows, token_ids, masks)
    else:
        columns = _sample_densely(logits, rows, token_ids)
    return columns if token_ids is None else token_ids[columns]


def likeliest_tokens(
    logits: Tensor, rows: RowSampling | None, k: int, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k tokens of each row that another model with similar logits and the same noise is likeliest to draw: those
    with the largest sums of score and noise, largest first.

    Arguments as for `sample_tokens`; rows is None where all are plain. k is at least 1, and V or more gives all.
    Returns tokens int64 [R, k] and their probabilities float32 [R, k], which never rise along a row; masked tokens have
    0.

    The probabilities are softmax(temperature * sum). At temperature 0 that is the softmax of the logits, as if the
    other model's logits were these plus Gumbel noise of scale 1; with shared noise the error scales with the
    temperature. Measured with a small draft model, hits among as many best nodes as tokens were 0.26, 0.23 and 0.24 of
    the tokens at temperatures 0.7, 1.0 and 1.3; by the tokens' own probabilities, without noise, 0.25, 0.18 and 0.11.
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    sums = logits
    if rows is not None and not rows.is_greedy:
        sums = process_logits(logits.detach(), rows, token_ids)
        if _add_noise(sums, rows, token_ids):
            sums.mul_(torch.from_numpy(rows.temperature).to(sums.device).unsqueeze(-1))
    columns, probs = most_probable(sums, k)
    if token_ids is None:
        return columns.to(torch.int64), probs
    if columns.device.type == "cpu":  # torch takes several times as long for few
        return torch.from_numpy(token_ids.numpy()[columns.numpy()]), probs
    return token_ids[columns], probs


def draft_with_probs(
    logits: Tensor, rows: RowSampling, k: int, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw draft tokens for rejection sampling from the k likeliest tokens of the processed draft distribution.

    Arguments as for `sample_tokens`. Returns tokens int64 [R], ids int64 [R, k] and probs float32 [R, k]; each row of
    probs sums to 1 and is the distribution that the token was drawn from, likeliest first, which is what the accept
    test needs. Greedy rows have all mass on the argmax. Drafts use a separate noise stream. k is at most V.

    The accept test is exact only if the decision to send a drawn token does not depend on that token.
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    scores, columns = _top(process_logits(logits.detach(), rows, token_ids), min(k, logits.shape[-1]))
    probs = scores.softmax(dim=-1)
    is_hot = torch.from_numpy(rows.is_hot).to(probs.device)
    first = torch.zeros_like(probs)
    first[:, 0] = 1.0
    probs = torch.where(is_hot.unsqueeze(-1), probs, first)
    ids = columns if token_ids is None else token_ids[columns]
    seeds, positions = _seeds_and_positions(rows, probs.device)
    sums = probs.to(torch.float64).log_() + noise.gumbel(seeds, positions, ids, noise.DRAFT)
    drawn = sums.argmax(dim=-1, keepdim=True)
    return ids.gather(-1, drawn).squeeze(-1), ids, probs


@cache
def _has_kernels(device: torch.device) -> bool:
    """Whether tokens are drawn by `device_sampling` there."""
    if device.type == "cuda":
        return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "meta"  # launches are counted there, not run


def _sample_densely(logits: Tensor, rows: RowSampling, token_ids: Tensor | None) -> Tensor:
    """Columns, int64 [R], with noise for all tokens."""
    scores = process_logits(logits, rows, token_ids)
    _add_noise(scores, rows, token_ids)
    return scores.argmax(dim=-1)


def _add_noise(scores: Tensor, rows: RowSampling, token_ids: Tensor | None) -> bool:
    """Add noise for all tokens in place; returns whether any row has noise."""
    hot = np.flatnonzero(rows.is_hot)
    if len(hot) > 0:
        seeds, positions = _seeds_and_positions(rows.take(hot), scores.device)
        ids = torch.arange(scores.shape[-1], device=scores.device) if token_ids is None else token_ids
        scores.index_add_(0, torch.from_numpy(hot).to(scores.device), noise.gumbel(seeds, positions, ids))
    return len(hot) > 0


def _sample_by_race(logits: Tensor, rows: RowSampling, token_ids: Tensor | None, masks: RowMasks | None) -> Tensor:
    """Columns, int64 [R], as `_sample_densely` finds them, with exact noise for the tokens that can win only. Only the
    allowed logits of a masked row are read."""
    chosen = torch.empty(len(rows), dtype=torch.int64)
    is_open = np.ones(len(rows), bool)
    if masks is None:
        plain = torch.from_numpy(rows.is_plain)
        if plain.any():
            chosen[plain] = logits[plain].argmax(dim=-1)
    else:
        is_open = ~masks.is_forced
        found_at_once = np.flatnonzero(rows.is_plain | masks.is_forced)
        chosen[torch.from_numpy(found_at_once)] = torch.from_numpy(argmax_within(logits, masks, found_at_once))
    hot = np.flatnonzero(rows.is_hot & is_open)
    adjusting = np.flatnonzero(rows.adjusts & is_open)
    adjusted = adjust_logits(logits[adjusting], rows.take(adjusting), token_ids)
    adjusted_index = np.full(len(rows), -1)
    adjusted_index[adjusting] = np.arange(len(adjusting))
    keys = noise.row_keys(*_seeds_and_positions(rows, logits.device)).numpy().view(np.uint64)
    all_ids = np.arange(logits.shape[-1]) if token_ids is None else token_ids.numpy()
    found: list[np.ndarray] = []
    found_scores: list[np.ndarray] = []
    for row in np.flatnonzero(~rows.is_plain & is_open).tolist():
        source = logits[row] if adjusted_index[row] < 0 else adjusted[adjusted_index[row]]
        scores = source.to(torch.float32).contiguous().numpy()
        allowed, ids = None, all_ids
        if masks is not None and masks.rows[row] >= 0:
            allowed = allowed_columns(masks.words[masks.rows[row]], len(scores))
            scores, ids = scores[allowed], all_ids[allowed]
        if rows.temperature[row] != 1.0:
            scores = scores / rows.temperature[row]
        if not rows.is_hot[row]:
            best = int(scores.argmax())
            chosen[row] = best if allowed is None else int(allowed[best])
            continue
        if rows.truncates[row]:
            record = rows.records[row]
            kept = support(scores, int(record["top_k"]), float(record["top_p"]), float(record["min_log_ratio"]))
            columns = kept[contenders(scores[kept], ids[kept], keys[row])]
        else:
            columns = contenders(scores, ids, keys[row])
        if len(columns) == 0:  # all tokens are masked; 0 as in _sample_densely
            columns = np.zeros(1, np.int64)
        found.append(columns if allowed is None else allowed[columns])
        found_scores.append(scores[columns])
    if len(hot) > 0:
        chosen[torch.from_numpy(hot)] = _winners(rows.take(hot), found, found_scores, all_ids)
    return chosen


def _winners(rows: RowSampling, columns: list[np.ndarray], scores: list[np.ndarray], token_ids: np.ndarray) -> Tensor:
    """The column with the largest score + noise of each row, int64 [R]. columns[r] ascends."""
    lengths = np.array([len(part) for part in columns])
    row_of = torch.from_numpy(np.repeat(np.arange(len(rows)), lengths))
    seeds, positions = _seeds_and_positions(rows, torch.device("cpu"))
    ids = torch.from_numpy(token_ids[np.concatenate(columns)]).unsqueeze(-1)
    drawn = noise.gumbel(seeds[row_of], positions[row_of], ids).squeeze(-1).numpy()
    sums = np.concatenate(scores) + drawn
    ends = lengths.cumsum()
    winners = [part[sums[end - len(part) : end].argmax()] for part, end in zip(columns, ends.tolist(), strict=True)]
    return torch.from_numpy(np.array(winners, np.int64))


def _seeds_and_positions(rows: RowSampling, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(rows.seeds).to(device), torch.from_numpy(rows.positions).to(device)


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest scores, float32 [R, k], and their columns; equal scores in column order, unlike torch.topk."""
    width = scores.shape[-1]
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ascending = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys = (ascending << 32) + torch.arange(width - 1, -1, -1, device=scores.device)
    columns = width - 1 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return scores.gather(-1, columns), columns
