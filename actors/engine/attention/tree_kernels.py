"""Triton kernels of attention with draft trees over the paged cache.

Query rows of one sequence and one key head are computed in tiles; query heads that share the key head are further rows
of the tile. Keys are walked in runs of logical slots: those in the cache by block, those of this forward from the new
keys themselves, so that no program waits for another's writes.

Values that are the first columns of the keys (latents) are in the cache once. Keys then come in two tiles, those
columns and the rest, so that neither is padded much; the first is the tile of values, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _last_not_after(first_rows, num_sequences, wanted, UNIT: tl.constexpr, OWN_TILE: tl.constexpr):
    """Last s in 0 .. num_sequences with first_rows[s] // UNIT + s * OWN_TILE <= wanted."""
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(first_rows + middle) // UNIT + middle * OWN_TILE
        if first <= wanted:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _finite(numbers):
    """Zeros for NaN and infinities, as all backends write them into the cache (see `KvCache`)."""
    return tl.where(tl.abs(numbers.to(tl.float32)) < float("inf"), numbers, 0.0).to(numbers.dtype)


@triton.jit
def _attend_run(
    acc,  # float32 [BLOCK_M, VALUE_BLOCK]
    highest,  # float32 [BLOCK_M], in units of log 2
    total,  # float32 [BLOCK_M]
    query,  # [BLOCK_M, KEY_BLOCK]
    query_rest,  # [BLOCK_M, REST_BLOCK]
    keys,  # pointer to the key head's first key
    values,
    key_stride,
    value_stride,
    first,  # logical slots first .. end - 1
    end,
    own_offset,  # row of logical slot 0, if the keys are those of this forward
    table,  # blocks of the sequence
    rows,  # int32 [BLOCK_M]
    is_row,  # bool [BLOCK_M]
    visible_ends,  # int32 [BLOCK_M]
    seen_from,  # int32 [BLOCK_M]: the first position in the window of each row; not read without one
    tree_start,
    ancestors,  # pointer [rows, words]
    node_positions,  # pointer to the sequence's
    words,  # of a row's ancestors
    scale,
    softcap,
    IS_OWN: tl.constexpr,
    IS_TREE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend to one run of slots, which are all committed (IS_TREE False) or all draft nodes."""
    key_dims = tl.arange(0, KEY_BLOCK)
    value_dims = tl.arange(0, VALUE_BLOCK)
    for start in range(first, end, BLOCK_N):
        slots = start + tl.arange(0, BLOCK_N)
        is_slot = slots < end
        if IS_OWN:
            places = (own_offset + slots).to(tl.int64)
        else:
            blocks = tl.load(table + slots // BLOCK_SIZE, mask=is_slot, other=0).to(tl.int64)
            places = blocks * BLOCK_SIZE + slots % BLOCK_SIZE
        key = tl.load(
            keys + places[None, :] * key_stride + key_dims[:, None],
            mask=is_slot[None, :] & (key_dims < MAIN_DIM)[:, None],
            other=0.0,
        )
        if IS_OWN:
            key = _finite(key)
        if REST_BLOCK > 0:
            value = tl.trans(key)
        else:
            value = tl.load(
                values + places[:, None] * value_stride + value_dims[None, :],
                mask=is_slot[:, None] & (value_dims < VALUE_DIM)[None, :],
                other=0.0,
            )
            if IS_OWN:
                value = _finite(value)
        if UPCAST:
            key = key.to(tl.float32)
        scores = tl.dot(query, key, input_precision="ieee")
        if REST_BLOCK > 0:
            rest_dims = MAIN_DIM + tl.arange(0, REST_BLOCK)
            rest = tl.load(
                keys + places[None, :] * key_stride + rest_dims[:, None],
                mask=is_slot[None, :] & (rest_dims < HEAD_DIM)[:, None],
                other=0.0,
            )
            if IS_OWN:
                rest = _finite(rest)
            if UPCAST:
                rest = rest.to(tl.float32)
            scores = tl.dot(query_rest, rest, scores, input_precision="ieee")
        scores = scores * scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), right at both infinities
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0))
        if IS_TREE:
            nodes = slots - tree_start
            bits = tl.load(
                ancestors + rows.to(tl.int64)[:, None] * words + (nodes // 64)[None, :],
                mask=is_row[:, None] & is_slot[None, :],
                other=0,
            )
            is_visible = ((bits >> (nodes % 64).to(tl.int64)[None, :]) & 1) != 0
            if WINDOW != 0:
                slot_positions = tl.load(node_positions + nodes, mask=is_slot, other=0)
                is_visible = is_visible & (slot_positions[None, :] >= seen_from[:, None])
        else:
            is_visible = is_slot[None, :] & (slots[None, :] < visible_ends[:, None])
            if WINDOW != 0:
                is_visible = is_visible & (slots[None, :] >= seen_from[:, None])
        scores = tl.where(is_visible, scores * LOG2_E, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(value.dtype)
        if UPCAST:
            weights = weights.to(tl.float32)
            value = value.to(tl.float32)
        acc = tl.dot(weights, value, acc * shrink[:, None], input_precision="ieee")
        highest = higher
    return acc, highest, total


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "max_blocks", "words", "split_size", "unsplit_rows"])
def attend_kernel(
    query,  # [rows, heads, HEAD_DIM]
    keys,  # [rows, kv_heads, HEAD_DIM]
    values,  # [rows, kv_heads, VALUE_DIM]
    pool_keys,  # [slots, kv_heads, HEAD_DIM]
    pool_values,  # [slots, kv_heads, VALUE_DIM]
    output,  # [rows, heads, VALUE_DIM]; split: float32 [splits, rows, heads, VALUE_DIM]
    log_sums,  # float32 [splits, rows, heads], log 2 of the softmax's denominator; not split: unused
    sinks,  # [heads]
    slots,
    first_rows,
    begins,
    tree_starts,
    block_tables,
    visible_ends,
    ancestors,
    row_positions,
    node_positions,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    pool_key_stride,
    pool_value_stride,
    num_rows,
    num_sequences,
    max_blocks,
    words,
    split_size,
    unsplit_rows,
    scale,
    softcap,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,  # query heads of a tile, which share a key head
    GROUPS: tl.constexpr,  # tiles that the query heads of a key head make
    HEAD_DIM: tl.constexpr,
    MAIN_DIM: tl.constexpr,  # columns of a key's first tile
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,  # MAIN_DIM rounded up to a power of two
    REST_BLOCK: tl.constexpr,  # the other columns likewise, if values are the first ones; else 0
    VALUE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # rows of a tile: BLOCK_M // SHARED
    WRITE_ROWS: tl.constexpr,  # TILE_ROWS rounded up to a power of two
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none; -n: chunks of n positions
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (tile of rows, tile of heads, split of keys). The first split also writes the rows' keys and values.

    A tile belongs to one sequence: sequence s has the tiles from first_rows[s] // TILE_ROWS + s on, which are enough
    for its rows. So the grid depends on the numbers of rows and sequences only; tiles without rows return.
    """
    tile = tl.program_id(0)
    head_tile = tl.program_id(1)
    kv_head = head_tile // GROUPS
    split = tl.program_id(2)
    sequence = _last_not_after(first_rows, num_sequences, tile, TILE_ROWS, 1)
    first_row = tl.load(first_rows + sequence)
    is_padding = sequence == num_sequences
    end_row = num_rows
    if sequence < num_sequences:
        end_row = tl.load(first_rows + sequence + 1)
    tile_row = (tile - (first_row // TILE_ROWS + sequence)) * TILE_ROWS  # counted from the sequence's first row
    count = end_row - first_row
    if tile_row >= count:
        return

    lanes = tl.arange(0, BLOCK_M)
    tile_rows = tile_row + lanes // SHARED
    is_row = (lanes < TILE_ROWS * SHARED) & (tile_rows < count)
    rows = first_row + tile_rows
    heads = head_tile * SHARED + lanes % SHARED
    value_dims = tl.arange(0, VALUE_BLOCK)
    places = ((split * num_rows).to(tl.int64) + rows) * HEADS + heads
    outputs = output + places[:, None] * VALUE_DIM + value_dims[None, :]
    is_output = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    if is_padding:
        if not IS_SPLIT:
            tl.store(outputs, tl.zeros([BLOCK_M, VALUE_BLOCK], output.dtype.element_ty), mask=is_output)
        return

    key_dims = tl.arange(0, KEY_BLOCK)
    if split == 0 and head_tile % GROUPS == 0:
        written = tile_row + tl.arange(0, WRITE_ROWS)
        is_written = (tl.arange(0, WRITE_ROWS) < TILE_ROWS) & (written < count)
        source = (first_row + written).to(tl.int64)
        target = tl.load(slots + source, mask=is_written, other=0)
        is_key = is_written[:, None] & (key_dims < MAIN_DIM)[None, :]
        new_keys = tl.load(
            keys + source[:, None] * key_stride + kv_head * key_head_stride + key_dims[None, :], mask=is_key, other=0.0
        )
        tl.store(
            pool_keys + target[:, None] * pool_key_stride + kv_head * HEAD_DIM + key_dims[None, :],
            _finite(new_keys),
            mask=is_key,
        )
        if REST_BLOCK > 0:
            rest_dims = MAIN_DIM + tl.arange(0, REST_BLOCK)
            is_rest = is_written[:, None] & (rest_dims < HEAD_DIM)[None, :]
            new_rest = tl.load(
                keys + source[:, None] * key_stride + kv_head * key_head_stride + rest_dims[None, :],
                mask=is_rest,
                other=0.0,
            )
            tl.store(
                pool_keys + target[:, None] * pool_key_stride + kv_head * HEAD_DIM + rest_dims[None, :],
                _finite(new_rest),
                mask=is_rest,
            )
        else:
            is_value = is_written[:, None] & (value_dims < VALUE_DIM)[None, :]
            new_values = tl.load(
                values + source[:, None] * value_stride + kv_head * value_head_stride + value_dims[None, :],
                mask=is_value,
                other=0.0,
            )
            tl.store(
                pool_values + target[:, None] * pool_value_stride + kv_head * VALUE_DIM + value_dims[None, :],
                _finite(new_values),
                mask=is_value,
            )

    begin = tl.load(begins + sequence)
    if begin < 0:  # written only
        return
    first = 0
    end_in_tile = tl.minimum(count, tile_row + TILE_ROWS)
    # No row sees a later one, unless its visible end says so. The tile's last row has the furthest one.
    end = tl.maximum(begin + end_in_tile, tl.load(visible_ends + first_row + end_in_tile - 1))
    if IS_SPLIT:
        if count <= unsplit_rows:
            if split * split_size >= begin + count:
                return
            first = split * split_size
            end = tl.minimum(end, first + split_size)
        elif split > 0:
            return
    seen_from = tl.load(row_positions + rows, mask=is_row, other=0)
    if WINDOW > 0:
        seen_from = seen_from - (WINDOW - 1)
    elif WINDOW < 0:
        seen_from = seen_from - seen_from % -WINDOW
    if WINDOW != 0:
        first = tl.maximum(first, tl.min(tl.where(is_row, seen_from, 2147483647), 0))
    ends = tl.load(visible_ends + rows, mask=is_row, other=0)
    tree_start = tl.load(tree_starts + sequence)
    table = block_tables + sequence.to(tl.int64) * max_blocks
    nodes = node_positions + sequence.to(tl.int64) * (64 * words)
    own_queries = query + rows.to(tl.int64)[:, None] * query_stride + heads.to(tl.int64)[:, None] * query_head_stride
    queries = tl.load(own_queries + key_dims[None, :], mask=is_row[:, None] & (key_dims < MAIN_DIM)[None, :], other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    query_rest = queries  # not read without a rest
    if REST_BLOCK > 0:
        rest_dims = MAIN_DIM + tl.arange(0, REST_BLOCK)
        query_rest = tl.load(
            own_queries + rest_dims[None, :], mask=is_row[:, None] & (rest_dims < HEAD_DIM)[None, :], other=0.0
        )
        if UPCAST:
            query_rest = query_rest.to(tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    own_offset = first_row - begin
    # Slots in the cache, then own slots; committed ones before draft nodes.
    for is_own in tl.static_range(2):
        for is_tree in tl.static_range(2):
            run_first = first
            run_end = end
            if is_own:
                run_first = tl.maximum(run_first, begin)
                run_keys = keys + kv_head * key_head_stride
                run_values = values + kv_head * value_head_stride
                run_key_stride = key_stride
                run_value_stride = value_stride
            else:
                run_end = tl.minimum(run_end, begin)
                run_keys = pool_keys + kv_head * HEAD_DIM
                run_values = pool_values + kv_head * VALUE_DIM
                run_key_stride = pool_key_stride
                run_value_stride = pool_value_stride
            if is_tree:
                run_first = tl.maximum(run_first, tree_start)
            else:
                run_end = tl.minimum(run_end, tree_start)
            acc, highest, total = _attend_run(
                acc,
                highest,
                total,
                queries,
                query_rest,
                run_keys,
                run_values,
                run_key_stride,
                run_value_stride,
                run_first,
                run_end,
                own_offset,
                table,
                rows,
                is_row,
                ends,
                seen_from,
                tree_start,
                ancestors,
                nodes,
                words,
                scale,
                softcap,
                is_own,
                is_tree,
                HEAD_DIM,
                MAIN_DIM,
                VALUE_DIM,
                KEY_BLOCK,
                REST_BLOCK,
                VALUE_BLOCK,
                BLOCK_N,
                BLOCK_SIZE,
                WINDOW,
                HAS_SOFTCAP,
                UPCAST,
            )
    if IS_SPLIT:
        log_sum = highest + tl.log2(tl.where(total > 0.0, total, 1.0))  # minus infinity where nothing is seen
        tl.store(log_sums + places, log_sum, mask=is_row)
    elif HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # a split may hold nothing that the row sees
    tl.store(outputs, acc.to(output.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "split_size", "unsplit_rows"])
def combine_kernel(
    parts,  # float32 [splits, rows, heads, VALUE_DIM]
    log_sums,  # float32 [splits, rows, heads]
    output,  # [rows, heads, VALUE_DIM]
    sinks,  # [heads]
    first_rows,
    begins,
    num_rows,
    num_sequences,
    split_size,
    unsplit_rows,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,  # splits rounded up to a power of two
    CHUNK: tl.constexpr,  # splits that are read at a time
    HAS_SINKS: tl.constexpr,
):
    """Grid (row, head): the splits' results, weighted by their share of the softmax's denominator."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, VALUE_BLOCK)
    is_dim = dims < VALUE_DIM
    place = row.to(tl.int64) * HEADS + head
    sequence = _last_not_after(first_rows, num_sequences, row, 1, 0)
    acc = tl.zeros([VALUE_BLOCK], tl.float32)
    total = 1.0
    if sequence < num_sequences:  # else padding
        count = tl.load(first_rows + sequence + 1) - tl.load(first_rows + sequence)
        begin = tl.load(begins + sequence)
        if begin < 0:  # written only
            return
        used = 1
        if count <= unsplit_rows:
            used = tl.cdiv(begin + count, split_size)
        step = num_rows.to(tl.int64) * HEADS
        splits = tl.arange(0, SPLITS_BLOCK)
        own = tl.load(log_sums + splits * step + place, mask=splits < used, other=float("-inf"))
        highest = tl.max(own, 0)
        if HAS_SINKS:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
            highest = tl.maximum(highest, sink)
        total = tl.sum(tl.exp2(own - highest), 0)
        if HAS_SINKS:
            total += tl.exp2(sink - highest)
        for first in range(0, used, CHUNK):
            some = first + tl.arange(0, CHUNK)
            is_used = some < used
            places = some * step + place
            weights = tl.exp2(tl.load(log_sums + places, mask=is_used, other=float("-inf")) - highest)
            part = tl.load(
                parts + places[:, None] * VALUE_DIM + dims[None, :], mask=is_used[:, None] & is_dim[None, :], other=0.0
            )
            acc += tl.sum(weights[:, None] * part, 0)
    tl.store(output + place * VALUE_DIM + dims, (acc / total).to(output.dtype.element_ty), mask=is_dim)
