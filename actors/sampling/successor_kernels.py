"""Triton kernels that find the likeliest tokens of rows of logits and their probabilities, in parts of the vocabulary.

What a part has found is a *summary*: one int64 word with the largest logit (float32, low half) and the sum of
exponentials relative to it (high half), then the order keys (see `triton_kernels`) of its likeliest tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from actors.sampling.triton_kernels import (
    _INFINITY,
    _LEAST,
    _column_of,
    _order_keys,
    _raw_scores,
    _score_of,
)


@triton.jit
def _two_floats(low, high):  # type: ignore[no-untyped-def]
    bits = low.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return bits | (high.to(tl.int32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def _low_float(word):  # type: ignore[no-untyped-def]
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _high_float(word):  # type: ignore[no-untyped-def]
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["first_id"])
def summary_kernel(  # type: ignore[no-untyped-def]
    logits,  # [R, V], rows `stride` apart
    stride,
    summaries,  # int64 [R, tiles, 1 + K], written
    width,
    first_id,  # of column 0
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The summary of one tile of a row."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    scores = _raw_scores(logits, stride, logits, row, columns, width, False)
    highest = tl.max(scores)
    shift = tl.where(highest == -_INFINITY, 0.0, highest)
    summary = summaries + (row.to(tl.int64) * tl.num_programs(0) + tile) * (1 + K)
    tl.store(summary, _two_floats(highest, tl.sum(tl.exp(scores - shift))))
    keys = tl.where(columns < width, _order_keys(scores, first_id + columns.to(tl.int64)), _LEAST)
    for place in range(K):
        best = tl.max(keys)
        tl.store(summary + 1 + place, best)
        keys = tl.where(keys == best, _LEAST, keys)


@triton.jit(do_not_specialize=["num_parts"])
def merge_kernel(  # type: ignore[no-untyped-def]
    summaries,  # int64 [.., 1 + K]: of part p of row r at r * row_stride + p * part_stride
    row_stride,
    part_stride,
    merged,  # int64, written: [R, 1 + K] summaries; the last time [R, K]: ids (low halves) and float32 probabilities
    num_parts,
    K: tl.constexpr,
    IS_LAST: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two
    KEYS: tl.constexpr,  # a power of two
):
    """One summary of all parts of a row."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    places = tl.arange(0, KEYS)
    is_part = parts < num_parts
    own = summaries + row * row_stride + parts.to(tl.int64) * part_stride
    sums = tl.load(own, mask=is_part, other=0)
    highest = tl.where(is_part, _low_float(sums), -_INFINITY)
    peak = tl.max(highest)
    shift = tl.where(peak == -_INFINITY, 0.0, peak)
    total = tl.sum(tl.where(is_part, _high_float(sums), 0.0) * tl.exp(highest - shift))
    is_key = is_part[:, None] & (places < K)[None, :]
    keys = tl.load(own[:, None] + 1 + places[None, :], mask=is_key, other=_LEAST)
    if not IS_LAST:
        tl.store(merged + row * (1 + K), _two_floats(peak, total))
    for place in range(K):
        best = tl.max(tl.max(keys, 1), 0)
        if IS_LAST:
            prob = tl.exp(_score_of(best) - shift - tl.log(total))
            word = _column_of(best) | (prob.to(tl.int32, bitcast=True).to(tl.int64) << 32)
            tl.store(merged + row * K + place, word)
        else:
            tl.store(merged + row * (1 + K) + 1 + place, best)
        keys = tl.where(keys == best, _LEAST, keys)
