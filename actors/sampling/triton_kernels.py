"""Triton kernels that draw tokens from rows of logits and walk draft trees with them.

Two forms carry a row through the kernels. The *order key* of a column is an int64 that is larger the earlier the column
comes when a row is sorted by falling score, equal scores by column: the score's bits, made monotonic, above the
complement of the column. So the largest key of any parts of a row is the row's argmax, and truncation is one
comparison. The *mass* of a column is its unnormalised probability as an integer, as in `processors.masses`, so sums
of masses do not depend on their order. Kernels must run without fused multiply-add, which rounds once where torch
rounds twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from actors.sampling import noise, packed_rows, rows
from actors.sampling.packed_rows import NUM_BINS, word_of
from actors.sampling.rows import ROW
from cache_service.splitmix64 import MIX_1, MIX_2, STEP

BINS = tl.constexpr(NUM_BINS)
_BINS_PER_UNIT = tl.constexpr(64.0)  # masses are 0 from distance 27.8, and the last bin holds all from 31.98
MAX_CANDIDATES = tl.constexpr(packed_rows.MAX_CANDIDATES)

# Fields of `rows.ROW`, in words of their type.
_ROW_WORDS = tl.constexpr(ROW.itemsize // 8)
_SEED, _POSITION, _TOP_K, _TOP_P, _TEMPERATURE, _MIN_LOG_RATIO, _FLAGS, _SLOT = (
    tl.constexpr(word_of(field))
    for field in ["seed", "position", "top_k", "top_p", "temperature", "min_log_ratio", "flags", "slot"]
)
_BEGIN, _END, _OWN_BEGIN, _OWN_END = (
    tl.constexpr(word_of(field)) for field in ["begin", "end", "own_begin", "own_end"]
)
IS_HOT = tl.constexpr(rows.IS_HOT)
TRUNCATES = tl.constexpr(rows.TRUNCATES)

_SEED_SALT = tl.constexpr(noise.SEED_SALT)
_POSITION_STEP = tl.constexpr(noise.POSITION_STEP)
_STEP, _MIX_1, _MIX_2 = (tl.constexpr(value) for value in (STEP, MIX_1, MIX_2))
_UNIFORM_SHIFT = tl.constexpr(noise.UNIFORM_SHIFT)
_UNIFORM_SCALE = tl.constexpr(noise.UNIFORM_SCALE)

_MASS_SCALE = tl.constexpr(float(1 << 40))
_LAST_COLUMN = tl.constexpr(0xFFFFFFFF)
_LEAST = tl.constexpr(-(2**63))
_MOST = tl.constexpr(2**63 - 1)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _mix(bits):  # type: ignore[no-untyped-def]
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)


@triton.jit
def gumbel(words, row, token_ids):  # type: ignore[no-untyped-def]
    """`noise.gumbel` of the row, float32, for int64 token ids."""
    seed = tl.load(words + row * _ROW_WORDS + _SEED).to(tl.uint64)
    position = tl.load(words + row * _ROW_WORDS + _POSITION).to(tl.uint64)
    key = _mix(_mix(_mix(seed + _SEED_SALT)) + position * _POSITION_STEP)
    bits = _mix(key + token_ids.to(tl.uint64) * _STEP)
    unit = ((bits >> _UNIFORM_SHIFT).to(tl.float64) + 0.5) * _UNIFORM_SCALE
    return (-tl.log(-tl.log(unit))).to(tl.float32)


@triton.jit
def _order_keys(scores, columns):  # type: ignore[no-untyped-def]
    """int64; NaN counts as the largest score, as in torch.argmax."""
    scores = tl.where(scores == 0.0, 0.0, scores)  # -0.0 equals 0.0
    bits = scores.to(tl.int32, bitcast=True)
    image = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    image = tl.where(scores != scores, 0x7FFFFFFF, image)
    return (image.to(tl.int64) << 32) + (_LAST_COLUMN - columns.to(tl.int64))


@triton.jit
def _score_of(keys):  # type: ignore[no-untyped-def]
    image = (keys >> 32).to(tl.int32)
    return tl.where(image < 0, image ^ 0x7FFFFFFF, image).to(tl.float32, bitcast=True)


@triton.jit
def _column_of(keys):  # type: ignore[no-untyped-def]
    return _LAST_COLUMN - (keys & _LAST_COLUMN)


@triton.jit
def _masses(scores, peak):  # type: ignore[no-untyped-def]
    """int64; 2**40 at the peak. The exponential is taken in float64, so that its rounding to float32 is the same
    everywhere."""
    return (tl.exp((scores - peak).to(tl.float64)).to(tl.float32) * _MASS_SCALE).to(tl.int64)


@triton.jit
def _bins(scores, peak):  # type: ignore[no-untyped-def]
    """int32, from 0 for the best scores; a score never has a smaller bin than a larger score."""
    return tl.minimum((peak - scores) * _BINS_PER_UNIT, BINS - 1.0).to(tl.int32)


@triton.jit
def _raw_scores(logits, stride, allowed, row, columns, width, HAS_MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits as float32; -inf beyond the width and for tokens that are not allowed."""
    inside = columns < width
    scores = tl.load(logits + row.to(tl.int64) * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_MASK:
        num_words = (width + 31) // 32
        words = tl.load(allowed + row.to(tl.int64) * num_words + columns // 32, mask=inside, other=0)
        inside = inside & (((words >> (columns % 32)) & 1) != 0)
    return tl.where(inside, scores, -_INFINITY)


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    allowed,
    adjusted,
    row,
    columns,
    width,
    HAS_MASK: tl.constexpr,
):
    """Scores after penalties, bias, mask and temperature, float32; -inf beyond the width. For kernels that follow
    `score_kernel`."""
    slot = tl.load(words.to(tl.pointer_type(tl.int32), bitcast=True) + row * 2 * _ROW_WORDS + _SLOT)
    if slot >= 0:
        inside = columns < width
        scores = tl.load(adjusted + slot.to(tl.int64) * width + columns, mask=inside, other=0.0)
        scores = tl.where(inside, scores, -_INFINITY)
    else:
        scores = _raw_scores(logits, stride, allowed, row, columns, width, HAS_MASK)
    return tl.math.div_rn(scores, _float(words, row, _TEMPERATURE))


@triton.jit
def _float(words, row, field: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(words.to(tl.pointer_type(tl.float32), bitcast=True) + row * 2 * _ROW_WORDS + field)


@triton.jit
def _int(words, row, field: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(words.to(tl.pointer_type(tl.int32), bitcast=True) + row * 2 * _ROW_WORDS + field)


@triton.jit
def row_truncates(words, row):  # type: ignore[no-untyped-def]
    return (_int(words, row, _FLAGS) & TRUNCATES) != 0


@triton.jit
def _top_p(words, row):  # type: ignore[no-untyped-def]
    return tl.load(words.to(tl.pointer_type(tl.float64), bitcast=True) + row * _ROW_WORDS + _TOP_P)


@triton.jit
def _adjust_tile(  # type: ignore[no-untyped-def]
    logits, stride, adjustments, allowed, row, first, width, first_id, target, begin, end, HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write to `target`, the row's scores, what the adjustments begin .. end - 1 (int32 words of `ADJUSTMENT`) that lie
    in the columns [first, first + BLOCK) make of the logits."""
    values = adjustments.to(tl.pointer_type(tl.float32), bitcast=True)
    for start in range(begin, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        column = tl.load(adjustments + entry * 4, mask=entry < end, other=-1) - first_id
        is_here = (column >= first) & (column < first + BLOCK) & (column < width)
        divisor = tl.load(values + entry * 4 + 1, mask=is_here, other=1.0)
        subtrahend = tl.load(values + entry * 4 + 2, mask=is_here, other=0.0)
        bias = tl.load(values + entry * 4 + 3, mask=is_here, other=0.0)
        before = _raw_scores(logits, stride, allowed, row, tl.where(is_here, column, width), width, HAS_MASK)
        after = tl.where(before > 0, tl.math.div_rn(before, divisor), before * divisor) - subtrahend + bias
        tl.store(target + column, after, mask=is_here)


@triton.jit(do_not_specialize=["num_rows", "first_id"])
def score_kernel(  # type: ignore[no-untyped-def]
    logits,  # [R, V], rows `stride` apart
    stride,
    words,  # int64, of packed_rows
    table,  # int64, adjustments of sequences; None: they are among the words
    allowed,  # int32 [R, ceil(V / 32)]
    token_ids,  # int64 [V]
    adjusted,  # float32 [slots, V], written
    counts,  # int32 [R, BINS], zeroed
    masses,  # int64 [R, BINS], zeroed
    bests,  # int64 [R, tiles], written: of rows that truncate without noise
    sums,  # float32 [R, tiles, 2], written: largest raw logit and the sum of exponentials relative to it
    num_rows,
    width,
    first_id,
    HAS_TABLE: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_BINS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scores of one tile of a row, and the best of them with noise."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    num_tiles = tl.num_programs(0)
    columns = tile * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    flags = _int(words, row, _FLAGS)
    scores = _raw_scores(logits, stride, allowed, row, columns, width, HAS_MASK)
    if HAS_SUMS:
        highest = tl.max(scores)
        shift = tl.where(highest == -_INFINITY, 0.0, highest)
        tl.store(sums + (row * num_tiles + tile) * 2, highest)
        tl.store(sums + (row * num_tiles + tile) * 2 + 1, tl.sum(tl.exp(scores - shift)))
    slot = _int(words, row, _SLOT)
    if slot >= 0:
        target = adjusted + slot.to(tl.int64) * width
        tl.store(target + columns, scores, mask=inside)
        tl.debug_barrier()
        own = words.to(tl.pointer_type(tl.int32), bitcast=True) + num_rows * 2 * _ROW_WORDS
        shared = own
        if HAS_TABLE:
            shared = table.to(tl.pointer_type(tl.int32), bitcast=True)
        _adjust_tile(
            logits, stride, shared, allowed, row, tile * BLOCK, width, first_id, target,
            _int(words, row, _BEGIN), _int(words, row, _END), HAS_MASK, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        _adjust_tile(
            logits, stride, own, allowed, row, tile * BLOCK, width, first_id, target,
            _int(words, row, _OWN_BEGIN), _int(words, row, _OWN_END), HAS_MASK, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
        scores = tl.where(inside, tl.load(target + columns, mask=inside, other=0.0), -_INFINITY)
    scores = tl.math.div_rn(scores, _float(words, row, _TEMPERATURE))
    if flags == IS_HOT:
        if HAS_IDS:
            ids = tl.load(token_ids + columns, mask=inside, other=0)
        else:
            ids = first_id + columns.to(tl.int64)
        scores = scores + gumbel(words, row, ids)
    tl.store(bests + row * num_tiles + tile, tl.max(_order_keys(scores, first_id + columns.to(tl.int64))))
    if HAS_BINS:
        for start in range(tile * 256, BINS, num_tiles * 256):
            places = row * BINS + start + tl.arange(0, 256)
            tl.store(counts + places, tl.zeros([256], tl.int32))
            tl.store(masses + places, tl.zeros([256], tl.int64))


@triton.jit
def histogram_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    allowed,
    adjusted,
    bests,  # int64 [R, tiles], of score_kernel
    counts,  # added to, for rows with top-k
    masses,  # added to, for rows with top-p
    peaks,  # float32 [R], written: the best score; 0 if it is -inf
    width,
    HAS_MASK: tl.constexpr,
    TILES: tl.constexpr,  # a power of two
    BLOCK: tl.constexpr,
):
    """Columns and masses of one tile by distance from the row's best score."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    num_tiles = tl.num_programs(0)
    tiles = tl.arange(0, TILES)
    best = tl.max(tl.load(bests + row * num_tiles + tiles, mask=tiles < num_tiles, other=_LEAST))
    peak = _score_of(best)
    peak = tl.where(peak == -_INFINITY, 0.0, peak)
    if tile == 0:
        tl.store(peaks + row, peak)
    if row_truncates(words, row):
        has_top_k = tl.load(words + row * _ROW_WORDS + _TOP_K) > 0
        has_top_p = _top_p(words, row) < 1.0
        if has_top_k | has_top_p:
            columns = tile * BLOCK + tl.arange(0, BLOCK)
            scores = _scores(logits, stride, words, allowed, adjusted, row, columns, width, HAS_MASK)
            bins = _bins(scores, peak)
            if has_top_k:
                every = tl.arange(0, BINS)
                found = tl.histogram(bins, BINS, mask=columns < width)
                tl.atomic_add(counts + row * BINS + every, found, mask=found > 0, sem="relaxed")
            if has_top_p:
                mass = _masses(scores, peak)
                tl.atomic_add(masses + row * BINS + bins, mass, mask=mass > 0, sem="relaxed")


@triton.jit
def _crossing(histogram, needed):  # type: ignore[no-untyped-def]
    """The bin in which the running sum reaches `needed`, the sum before it."""
    up_to = tl.cumsum(tl.load(histogram + tl.arange(0, BINS)).to(tl.int64), 0)
    is_short = up_to < needed
    return tl.sum(is_short.to(tl.int32)), tl.max(tl.where(is_short, up_to, 0))


@triton.jit
def _candidates(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    allowed,
    adjusted,
    kept_aside,
    row,
    wanted,
    peak,
    start,
    count,
    width,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Order keys of the bin's columns among the next BLOCK, and which of the BLOCK they are."""
    index = start + tl.arange(0, BLOCK)
    if count <= MAX_CANDIDATES:
        is_one = index < count
        keys = tl.load(kept_aside + index, mask=is_one, other=0)
    else:
        scores = _scores(logits, stride, words, allowed, adjusted, row, index, width, HAS_MASK)
        is_one = (index < width) & (_bins(scores, peak) == wanted)
        keys = _order_keys(scores, index)
    return keys, is_one


@triton.jit
def _cut_within(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    allowed,
    adjusted,
    kept_aside,
    row,
    wanted,
    peak,
    needed,
    width,
    BY_MASS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest order key of a column of bin `wanted` such that those from it on weigh at least `needed`, and the
    mass of these. Weights are masses or 1."""
    count = 0
    low = _MOST + tl.zeros([], tl.int64)
    high = _LEAST + tl.zeros([], tl.int64)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scores = _scores(logits, stride, words, allowed, adjusted, row, columns, width, HAS_MASK)
        is_one = (columns < width) & (_bins(scores, peak) == wanted)
        keys = _order_keys(scores, columns)
        places = count + tl.cumsum(is_one.to(tl.int32), 0) - 1
        tl.store(kept_aside + places, keys, mask=is_one & (places < MAX_CANDIDATES))
        count += tl.sum(is_one.to(tl.int32))
        low = tl.minimum(low, tl.min(tl.where(is_one, keys, _MOST)))
        high = tl.maximum(high, tl.max(tl.where(is_one, keys, _LEAST)))
    tl.debug_barrier()
    limit = tl.where(count <= MAX_CANDIDATES, count, width)

    # The answer is a candidate's key in [low, high]; each turn moves an end to another candidate.
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, without overflow
        weight = tl.zeros([], tl.int64)
        above = _MOST + tl.zeros([], tl.int64)
        below = _LEAST + tl.zeros([], tl.int64)
        for start in range(0, limit, BLOCK):
            keys, is_one = _candidates(
                logits, stride, words, allowed, adjusted, kept_aside, row, wanted, peak, start, count, width,
                HAS_MASK, BLOCK,
            )  # fmt: skip
            is_above = is_one & (keys >= middle)
            if BY_MASS:
                weight += tl.sum(tl.where(is_above, _masses(tl.where(is_one, _score_of(keys), peak), peak), 0))
            else:
                weight += tl.sum(is_above.to(tl.int64))
            above = tl.minimum(above, tl.min(tl.where(is_above, keys, _MOST)))
            below = tl.maximum(below, tl.max(tl.where(is_one & (keys < middle), keys, _LEAST)))
        is_enough = weight >= needed
        low = tl.where(is_enough, above, low)
        high = tl.where(is_enough, high, below)

    mass = tl.zeros([], tl.int64)
    if not BY_MASS:
        for start in range(0, limit, BLOCK):
            keys, is_one = _candidates(
                logits, stride, words, allowed, adjusted, kept_aside, row, wanted, peak, start, count, width,
                HAS_MASK, BLOCK,
            )  # fmt: skip
            is_above = is_one & (keys >= low)
            mass += tl.sum(tl.where(is_above, _masses(tl.where(is_one, _score_of(keys), peak), peak), 0))
    tl.debug_barrier()  # before others are kept aside in the same place
    return low, mass


@triton.jit
def cut_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    allowed,
    adjusted,
    counts,
    masses,
    peaks,
    kept_aside,  # int64 [R, MAX_CANDIDATES], scratch
    cuts,  # int64 [R], written: the least order key that top-k and top-p keep
    width,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where top-k and top-p cut one row, as `processors.process_logits` does."""
    row = tl.program_id(0)
    cut = _LEAST + tl.zeros([], tl.int64)
    if row_truncates(words, row):
        peak = tl.load(peaks + row)
        aside = kept_aside + row.to(tl.int64) * MAX_CANDIDATES
        top_k = tl.load(words + row * _ROW_WORDS + _TOP_K)
        top_p = _top_p(words, row)
        total = tl.sum(tl.load(masses + row * BINS + tl.arange(0, BINS)))
        if (top_k > 0) & (top_k < width):
            wanted, before = _crossing(counts + row * BINS, top_k)
            cut, mass = _cut_within(
                logits, stride, words, allowed, adjusted, aside, row, wanted, peak, top_k - before, width,
                False, HAS_MASK, BLOCK,
            )  # fmt: skip
            every = tl.arange(0, BINS)
            total = mass + tl.sum(tl.load(masses + row * BINS + every, mask=every < wanted, other=0))
        if top_p < 1.0:
            needed = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
            if needed <= total:
                wanted, before = _crossing(masses + row * BINS, needed)
                cut, mass = _cut_within(
                    logits, stride, words, allowed, adjusted, aside, row, wanted, peak, needed - before, width,
                    True, HAS_MASK, BLOCK,
                )  # fmt: skip
    tl.store(cuts + row, cut)


@triton.jit
def draw_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    allowed,
    token_ids,
    adjusted,
    bests,  # int64 [R, tiles], of score_kernel
    peaks,
    cuts,
    drawn,  # int64 [R, tiles], written: as bests, with noise for rows that truncate, too
    width,
    HAS_IDS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best of one tile with noise among the columns that truncation keeps."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    place = row * tl.num_programs(0) + tile
    best = tl.load(bests + place)
    if row_truncates(words, row):
        columns = tile * BLOCK + tl.arange(0, BLOCK)
        scores = _scores(logits, stride, words, allowed, adjusted, row, columns, width, HAS_MASK)
        is_kept = _order_keys(scores, columns) >= tl.load(cuts + row)
        is_kept &= scores - tl.load(peaks + row) >= _float(words, row, _MIN_LOG_RATIO)
        if HAS_IDS:
            ids = tl.load(token_ids + columns, mask=columns < width, other=0)
        else:
            ids = columns.to(tl.int64)
        scores = tl.where(is_kept, scores + gumbel(words, row, ids), -_INFINITY)
        best = tl.max(_order_keys(scores, columns))
    tl.store(drawn + place, best)


@triton.jit
def sums_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    words,
    allowed,
    token_ids,
    adjusted,
    peaks,
    cuts,
    sums,  # float32 [R, V], written
    width,
    HAS_IDS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Temperature times score and noise of one tile; -inf for columns that truncation drops."""
    row = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    flags = _int(words, row, _FLAGS)
    scores = _scores(logits, stride, words, allowed, adjusted, row, columns, width, HAS_MASK)
    is_kept = inside
    if HAS_CUTS:  # noqa: SIM102  # decided when the kernel is compiled
        if (flags & TRUNCATES) != 0:
            is_kept &= _order_keys(scores, columns) >= tl.load(cuts + row)
            is_kept &= scores - tl.load(peaks + row) >= _float(words, row, _MIN_LOG_RATIO)
    if (flags & IS_HOT) != 0:
        if HAS_IDS:
            ids = tl.load(token_ids + columns, mask=inside, other=0)
        else:
            ids = columns.to(tl.int64)
        scores = (scores + gumbel(words, row, ids)) * _float(words, row, _TEMPERATURE)
    place = sums + row.to(tl.int64) * width + columns
    tl.store(place, tl.where(is_kept, scores, -_INFINITY), mask=inside)


@triton.jit(do_not_specialize=["num_parts"])
def reduce_kernel(  # type: ignore[no-untyped-def]
    bests,  # int64 [R, parts]: order keys of tiles, or of shards of the vocabulary
    row_stride,  # of `bests`
    part_stride,
    logits,
    stride,
    token_ids,
    sums,
    results,  # int64 [R], written: the token
    logprobs,  # float32 [R], written
    num_parts,
    HAS_IDS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two
):
    """The token of one row, and its log-probability by the raw logits."""
    row = tl.program_id(0)
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    best = tl.max(tl.load(bests + row * row_stride + parts * part_stride, mask=is_part, other=_LEAST))
    column = _column_of(best)
    if HAS_SUMS:
        highest = tl.load(sums + (row * num_parts + parts) * 2, mask=is_part, other=-_INFINITY)
        total = tl.load(sums + (row * num_parts + parts) * 2 + 1, mask=is_part, other=0.0)
        peak = tl.max(highest)
        shift = tl.where(peak == -_INFINITY, 0.0, peak)
        total = tl.sum(total * tl.exp(highest - shift))
        logit = tl.load(logits + row.to(tl.int64) * stride + column).to(tl.float32)
        tl.store(logprobs + row, logit - shift - tl.log(total))
    if HAS_IDS:
        column = tl.load(token_ids + column)
    tl.store(results + row, column)


@triton.jit
def walk_kernel(  # type: ignore[no-untyped-def]
    drawn,  # int64 [rows]: the target's tokens; the root and then the nodes of each tree
    tokens,  # int32 [nodes], trees one after the other
    parents,  # int32 [nodes], within the tree
    offsets,  # int32 [trees + 1]: nodes of tree t are offsets[t] .. offsets[t + 1] - 1; negative: no tree
    walked,  # int64 [trees, 2 + width], written: number of accepted nodes, next token, the nodes, then -1
    width,
    NODES: tl.constexpr,  # a power of two; no tree has more
):
    """`verification.walk_tree` of one tree."""
    tree = tl.program_id(0)
    begin = tl.load(offsets + tree)
    end = tl.load(offsets + tree + 1)
    is_tree = (begin >= 0) & (end >= 0)
    count = end - begin
    index = tl.arange(0, NODES)
    is_node = index < count
    token = tl.load(tokens + begin + index, mask=is_node, other=0)
    parent = tl.load(parents + begin + index, mask=is_node, other=-2)
    rows = drawn + begin + tree
    result = walked + tree.to(tl.int64) * (width + 2)
    tl.store(result + 2 + index, tl.full([NODES], -1, tl.int64), mask=index < width)
    tl.debug_barrier()
    length = 0
    wanted = tl.load(rows, mask=is_tree, other=0)
    child = _child(index, parent, token, -1, wanted, NODES)
    while child < NODES:
        tl.store(result + 2 + length, child.to(tl.int64))
        length += 1
        wanted = tl.load(rows + 1 + child)
        child = _child(index, parent, token, child, wanted, NODES)
    tl.store(result, length)
    tl.store(result + 1, wanted)


@triton.jit
def _child(index, parent, token, node, wanted, NODES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first child of the node with the wanted token; NODES if it has none."""
    is_child = (parent == node) & (token == wanted) & (index > node)
    return tl.min(tl.where(is_child, index, NODES))
