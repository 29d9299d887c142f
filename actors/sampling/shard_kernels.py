"""Triton kernels that draw tokens from a vocabulary in shards; see `device_shards`.

In the order keys (see `triton_kernels`) that shards exchange, ids take the place of columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from actors.sampling.triton_kernels import (
    _INFINITY,
    _LEAST,
    _MIN_LOG_RATIO,
    _MOST,
    _ROW_WORDS,
    _TOP_K,
    _column_of,
    _float,
    _masses,
    _order_keys,
    _score_of,
    _scores,
    _top_p,
    gumbel,
    row_truncates,
)


@triton.jit(do_not_specialize=["first_id"])
def leaders_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    allowed,
    adjusted,
    leaders,  # int64 [R, tiles, K], written for rows that truncate
    width,
    first_id,  # of column 0
    HAS_MASK: tl.constexpr,
    K: tl.constexpr,  # a power of two, at most BLOCK
    BLOCK: tl.constexpr,
):
    """The K largest order keys of one tile of a row, largest first; the least int64 where there are no more."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    if row_truncates(words, row):
        columns = tile * BLOCK + tl.arange(0, BLOCK)
        scores = _scores(logits, stride, words, allowed, adjusted, row, columns, width, HAS_MASK)
        keys = tl.where(columns < width, _order_keys(scores, first_id + columns.to(tl.int64)), _LEAST)
        place = (row.to(tl.int64) * tl.num_programs(0) + tile) * K
        tl.store(leaders + place + tl.arange(0, K), tl.topk(keys, K))


@triton.jit(do_not_specialize=["num_parts"])
def merge_leaders_kernel(  # type: ignore[no-untyped-def]
    parts,  # int64 [R, parts, K]
    words,
    leaders,  # int64 [R, K], written for rows that truncate
    tallies,  # int64 [R, 2], written: nothing, for tally_kernel to add to
    num_parts,
    K: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two
):
    """The K largest of a row."""
    row = tl.program_id(0).to(tl.int64)
    if row_truncates(words, row):
        index = tl.arange(0, PARTS * K)
        keys = tl.load(parts + row * num_parts * K + index, mask=index < num_parts * K, other=_LEAST)
        if K == 1:
            tl.store(leaders + row, tl.max(keys))
        else:
            tl.store(leaders + row * K + tl.arange(0, K), tl.topk(keys, K))
    tl.store(tallies + row * 2, 0)
    tl.store(tallies + row * 2 + 1, _LEAST)


@triton.jit
def _peak(leaders, row, num_rows, SHARDS: tl.constexpr, POWER: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row's best score of all shards; 0 if it is -inf. leaders: int64 [shards, R, K]."""
    shards = tl.arange(0, POWER)
    firsts = leaders + (shards.to(tl.int64) * num_rows + row) * K
    peak = _score_of(tl.max(tl.load(firsts, mask=shards < SHARDS, other=_LEAST)))
    return tl.where(peak == -_INFINITY, 0.0, peak)


@triton.jit(do_not_specialize=["num_rows", "first_id"])
def tally_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    allowed,
    adjusted,
    bests,  # int64 [R, tiles], of score_kernel
    leaders,  # int64 [shards, R, K]
    tallies,  # int64 [R, 2], added to: mass; best
    num_rows,
    width,
    first_id,
    HAS_MASK: tl.constexpr,
    SHARDS: tl.constexpr,
    POWER: tl.constexpr,  # the least power of two from SHARDS on
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mass and best of one tile of a row. For rows that truncate the best has noise, too, and min-p keeps it."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    best = tl.load(bests + row * tl.num_programs(0) + tile)
    if row_truncates(words, row):
        peak = _peak(leaders, row, num_rows, SHARDS, POWER, K)
        columns = tile * BLOCK + tl.arange(0, BLOCK)
        ids = first_id + columns.to(tl.int64)
        scores = _scores(logits, stride, words, allowed, adjusted, row, columns, width, HAS_MASK)
        if _top_p(words, row) < 1.0:
            tl.atomic_add(tallies + row * 2, tl.sum(_masses(scores, peak)), sem="relaxed")
        is_kept = scores - peak >= _float(words, row, _MIN_LOG_RATIO)
        best = tl.max(_order_keys(tl.where(is_kept, scores + gumbel(words, row, ids), -_INFINITY), ids))
    tl.atomic_max(tallies + row * 2 + 1, best, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"])
def join_kernel(  # type: ignore[no-untyped-def]
    leaders,  # int64 [shards, R, K]
    tallies,  # int64 [shards, R, 2]
    words,
    tokens,  # int64 [R], written
    num_rows,
    width,  # of all shards
    SHARDS: tl.constexpr,
    POWER: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,  # divides K
):
    """The token of one row, -1 where the leaders do not tell.

    A leader is *certain* if no shard may have held back a larger score, so mass and number of the columns above it are
    known. The winner without top-k and top-p, among all columns, is the token if these keep it. Otherwise the token is
    among the certain leaders, if they reach the cut.
    """
    row = tl.program_id(0).to(tl.int64)
    shards = tl.arange(0, POWER)
    is_shard = shards < SHARDS
    tally = tallies + (shards.to(tl.int64) * num_rows + row) * 2
    total = tl.sum(tl.load(tally, mask=is_shard, other=0))
    best = tl.max(tl.load(tally + 1, mask=is_shard, other=_LEAST))
    token = _column_of(best)
    top_k = tl.load(words + row * _ROW_WORDS + _TOP_K)
    top_p = _top_p(words, row)
    has_top_k = (top_k > 0) & (top_k < width)
    # A best of -inf: nothing may be drawn, and whole rows give their first column.
    if row_truncates(words, row) & (has_top_k | (top_p < 1.0)) & (_score_of(best) != -_INFINITY):
        peak = _peak(leaders, row, num_rows, SHARDS, POWER, K)
        lasts = leaders + (shards.to(tl.int64) * num_rows + row) * K + (K - 1)
        bound = tl.max(tl.load(lasts, mask=is_shard, other=_LEAST))
        bound = tl.maximum(bound, _LEAST + 1)  # shards with fewer columns fill up with the least
        index = tl.arange(0, POWER * K)
        own = leaders + ((index // K).to(tl.int64) * num_rows + row) * K + index % K
        keys = tl.load(own, mask=index < SHARDS * K, other=_LEAST)
        is_certain = keys >= bound
        scores = tl.where(is_certain, _score_of(keys), peak)
        mass = tl.where(is_certain, _masses(scores, peak), 0)
        mass_above = tl.zeros([POWER * K], tl.int64)
        num_above = tl.zeros([POWER * K], tl.int64)
        for start in range(0, SHARDS * K, CHUNK):
            others = start + tl.arange(0, CHUNK)
            place = leaders + ((others // K).to(tl.int64) * num_rows + row) * K + others % K
            other_keys = tl.load(place)
            other_scores = tl.where(other_keys >= bound, _score_of(other_keys), peak)
            other_mass = _masses(other_scores, peak)
            is_above = (other_keys[None, :] > keys[:, None]) & (other_keys >= bound)[None, :]
            mass_above += tl.sum(tl.where(is_above, other_mass[None, :], 0), 1)
            num_above += tl.sum(is_above.to(tl.int64), 1)

        limit = tl.where(has_top_k, top_k, width)
        in_top_k = is_certain & (num_above < limit)
        reached = tl.sum(tl.where(in_top_k, mass, 0))
        total = tl.where(has_top_k, reached, total)  # that top-k keeps; without enough leaders, at least
        needed = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
        needed = tl.where(top_p < 1.0, needed, _MOST)
        is_kept = in_top_k & (mass_above < needed)
        num_certain = tl.sum(is_certain.to(tl.int64))
        knows_cut = tl.where(has_top_k, num_certain >= top_k, reached >= needed)
        keeps_all = (limit == width) & (needed > total)
        ids = _column_of(keys)
        if knows_cut:
            is_kept = is_kept & (scores - peak >= _float(words, row, _MIN_LOG_RATIO))
            sums = tl.where(is_kept, scores + gumbel(words, row, ids), -_INFINITY)
            token = _column_of(tl.max(_order_keys(sums, ids)))
        else:
            is_best_kept = tl.max((is_kept & (ids == token)).to(tl.int32)) > 0
            token = tl.where(is_best_kept | keeps_all, token, -1)
    tl.store(tokens + row, token)
