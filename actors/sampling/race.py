"""Samples one row on a CPU with exact noise only for the tokens that can win.

The result is argmax(scores + noise) over the whole vocabulary. Truncation finds its cut in a histogram instead of
sorting the row. Then a compiled pass hashes each token and compares integers with a threshold of the noise that the
token needs to win; only tokens above it need two logarithms.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import torch

from actors.sampling.noise import MAX_NOISE
from actors.sampling.processors import masses
from cache_service.splitmix64 import STEP, finalize_uint64

_BINS = 2048
_NEAR = np.float32(16.0)
_BINS_PER_UNIT = 32.0  # bins per unit of log-probability; the last bin holds all that is 64 or more below the best


def support(scores: np.ndarray, top_k: int, top_p: float, min_log_ratio: float) -> np.ndarray:
    """Columns that truncation keeps, int64, ascending; the same as `process_logits` keeps.

    scores: float32 [V], after temperature. top_k: 0 is off. top_p: 1 is off. min_log_ratio: log(min_p), -inf is off.
    """
    peak = scores.max()
    if peak == -np.inf:
        return np.zeros(1, np.int64)
    depths = peak - scores
    if top_k <= 0 and top_p >= 1.0:
        return np.flatnonzero(-depths >= np.float32(min_log_ratio))
    # The cut is nearly always among the few tokens close to the best.
    near = np.flatnonzero(depths < _NEAR)
    peak_tensor = torch.tensor(peak)
    if top_k > 0:
        pool = near if len(near) >= top_k else np.arange(len(scores))
        kept = pool[_head(depths[pool], np.ones(len(pool), np.int64), top_k)]
        if top_p < 1.0:
            mass = masses(torch.from_numpy(scores[kept]), peak_tensor).numpy()
            kept = kept[_head(depths[kept], mass, _mass_limit(mass, top_p))]
    else:
        mass = masses(torch.from_numpy(scores), peak_tensor).numpy()
        limit = _mass_limit(mass, top_p)
        pool = near if mass[near].sum() >= limit else np.arange(len(scores))
        kept = pool[_head(depths[pool], mass[pool], limit)]
    return kept[-depths[kept] >= np.float32(min_log_ratio)]


def _mass_limit(mass: np.ndarray, top_p: float) -> int:
    # At least 1, so that the likeliest token stays however small top_p is.
    return max(1, math.ceil(top_p * float(mass.sum())))


@numba.njit(cache=True, nogil=True)
def _head(depths: np.ndarray, weights: np.ndarray, limit: int) -> np.ndarray:
    """Indices, int64 ascending, of the entries before which less than `limit` of weight lies, in order of depth.

    depths: float32 [n], >= 0; equal ones count in order of index. weights: int64 [n]. A histogram finds where the limit
    falls, and only the entries of that one bin are sorted.
    """
    histogram = np.zeros(_BINS, np.int64)
    bins = np.empty(len(depths), np.int16)
    for index in range(len(depths)):
        scaled = depths[index] * np.float32(_BINS_PER_UNIT)
        bins[index] = np.int16(scaled) if scaled < _BINS - 1 else np.int16(_BINS - 1)
        histogram[bins[index]] += weights[index]
    last, before = 0, np.int64(0)
    while last < _BINS - 1 and before + histogram[last] < limit:
        before += histogram[last]
        last += 1

    inside = np.nonzero(bins == last)[0]
    inside = inside[np.argsort(depths[inside], kind="mergesort")]
    taken = 0
    while taken < len(inside) and before < limit:
        before += weights[inside[taken]]
        taken += 1
    bins[inside[:taken]] = -1
    return np.nonzero(bins < last)[0]


@numba.njit(cache=True, nogil=True)
def contenders(scores: np.ndarray, token_ids: np.ndarray, key: np.uint64) -> np.ndarray:
    """Indices, int64 ascending, of the entries that may win argmax(scores + noise); the winner is always among them.

    scores: float32 [n]. token_ids: int64 [n]. key: the row's hash state, `noise.row_keys` as uint64.
    """
    whole = np.uint64(1 << 52)
    # -log(u) >= 1 - u, so noise above g needs 1 - u < exp(-g). In units of 2**-52, rounded up, for g = 0, 1, 2, ...
    distance_limits = np.empty(64, np.uint64)
    for index in range(64):
        distance_limits[index] = np.uint64(math.ceil(2.0**52 * math.exp(-index))) + np.uint64(1)

    leader = 0
    for index in range(len(scores)):
        if scores[index] > scores[leader]:
            leader = index
    found = np.empty(len(scores), np.int64)
    count = 0
    best = -np.inf
    bar = -np.inf  # a little under the best sum so far: sums are compared in float32 in the end
    for turn in range(-1, len(scores)):  # starts with the likeliest entry, for a high bar
        index = leader if turn < 0 else turn
        score = float(scores[index])
        needed = bar - score
        if not needed < MAX_NOISE:
            continue
        # The bits of `noise.gumbel`.
        mantissa = finalize_uint64(key + np.uint64(token_ids[index]) * np.uint64(STEP)) >> np.uint64(12)
        if needed > 0.0 and whole - mantissa > distance_limits[int(needed)]:
            continue
        total = score - math.log(-math.log((float(mantissa) + 0.5) * 2.0**-52))
        if total > best:
            best = total
            bar = best - 1e-3 - 1e-6 * abs(best)
        if turn >= 0 and total >= bar:
            found[count] = index
            count += 1
    return found[:count].copy()
