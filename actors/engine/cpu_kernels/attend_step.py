"""Attention of a decoder layer on CPU, as a step for `run_steps`: all sequences, draft trees and long prompts alike.

Keys and values are read block by block with the softmax of Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018, as in FlashAttention; products are those of `microkernel`. Query heads that share a key head are further
rows of one product. A row whose visible slots are contiguous has the same bits in any company.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import carray, njit

from actors.engine.cpu_kernels.addresses import call, floats, int32s, int64s, keep_alive
from actors.engine.cpu_kernels.entry_points import SOURCES, entry_point
from actors.engine.cpu_kernels.layer_state import (
    ANCESTORS,
    BLOCK_SIZE,
    BLOCK_TABLES,
    CACHE,
    CONTEXTS,
    FIRST_ROWS,
    INPUTS,
    NODE_POSITIONS,
    POSITIONS,
    PRODUCTS,
    ROWS,
    SEQUENCES,
    TABLE_WIDTH,
    TREE_STARTS,
    VISIBLE_ENDS,
    WORDS,
)
from actors.engine.cpu_kernels.layer_steps import store
from actors.engine.cpu_kernels.numbers import (
    copy_lanes,
    largest,
    rounded,
    turn_floats,
    turn_halves,
    weigh,
    widen_lanes,
)
from actors.engine.cpu_kernels.threads import num_threads, thread_num
from actors.engine.cpu_kernels.weight_formats import PANEL
from actors.sampling.exponential import exponential

_KEYS = 64  # of a block
_QUERIES = 96  # of a task at most: rows times query heads that share a key head
_FAST = {"reassoc", "contract", "nsz"}
_HIDDEN = np.float32(-1e30)  # scores below are of slots that a row does not see


@lru_cache
def attend(rounds: bool) -> int:
    """inputs = what the rotated queries in the products attend to.

    Fields: state, heads, key heads, head dim (a multiple of 16), stride of the products, layer, bits of the scale in
    float32, sliding window (0: none), whether inputs are halves, address of `multiply` for float32.
    """
    sources = SOURCES

    def share(work):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        state, heads, key_heads = int64s(work[0]), work[1], work[2]
        most_rows = max(1, _QUERIES // (heads // key_heads))
        first_rows, contexts = int32s(state[FIRST_ROWS]), int32s(state[CONTEXTS])
        thread, threads = thread_num(), num_threads()
        if thread == 0:  # rows of padding attend to nothing
            first, width = first_rows[state[SEQUENCES]], heads * work[3]
            nothing = np.zeros(width, np.float32)
            for row in range(first, state[ROWS]):
                store(state[INPUTS], row * width, nothing, work[8] == 1)
        task = 0
        for sequence in range(state[SEQUENCES]):
            for first in range(first_rows[sequence], first_rows[sequence + 1], most_rows):
                num_rows = min(most_rows, first_rows[sequence + 1] - first)
                for head in range(key_heads):
                    if task % threads == thread:
                        _attend_rows(work, state, sequence, head, first, num_rows, contexts[sequence], rounds)
                    task += 1

    return entry_point(share)


@njit(nogil=True, error_model="numpy")
def _attend_rows(work, state, sequence, head, first, num_rows, context, rounds):  # type: ignore[no-untyped-def]
    heads, key_heads, dim, stride, window, product = work[1], work[2], work[3], work[4], work[7], work[9]
    cache, scale = int64s(state[CACHE] + 16 * work[5]), np.int32(work[6]).view(np.float32)
    shared = heads // key_heads
    num_queries = num_rows * shared
    queries = np.empty((num_queries, dim), np.float32)
    for own in range(num_rows):
        place = state[PRODUCTS] + 4 * ((first + own) * stride + head * shared * dim)
        queries[own * shared : (own + 1) * shared] = carray(floats(place), (shared, dim)) * scale
    keys, values = np.empty(_KEYS * dim, np.float32), np.empty(_KEYS * dim, np.float32)
    scores, sums = np.empty((num_queries, _KEYS), np.float32), np.zeros((num_queries, dim), np.float32)
    highest, totals = np.full(num_queries, _HIDDEN), np.zeros(num_queries, np.float32)
    scoring, summing = np.empty(8, np.int64), np.empty(8, np.int64)
    scoring[:] = (_at(queries), num_queries, dim, _at(keys), _at(scores), _KEYS, 0, 0)
    summing[:] = (_at(scores), num_queries, _KEYS, _at(values), _at(sums), dim, 0, dim // PANEL)
    begin, end = _seen(state, sequence, first, num_rows, context, window)
    for block in range(begin // _KEYS * _KEYS, end, _KEYS):
        count = min(_KEYS, end - block)
        _gather(cache, state, sequence, block, count, head, key_heads, dim, _at(keys), _at(values), rounds)
        scores[:] = np.float32(0.0)
        scoring[7] = (count + PANEL - 1) // PANEL
        call(product, _at(scoring))
        scores[:, count:] = np.float32(-np.inf)
        _hide(scores, state, sequence, first, num_rows, shared, block, count, window)
        _weigh(scores, highest, totals, sums)
        call(product, _at(summing))
    keep_alive(queries)
    keep_alive(keys)
    keep_alive(values)
    keep_alive(scoring)
    keep_alive(summing)
    for own in range(num_rows):
        for group in range(shared):
            query = own * shared + group
            for d in range(dim):
                number = sums[query, d] / totals[query]
                sums[query, d] = rounded(number) if rounds else number
            store(state[INPUTS], ((first + own) * heads + head * shared + group) * dim, sums[query], work[8] == 1)


@njit(nogil=True)
def _at(array):  # type: ignore[no-untyped-def]
    return np.int64(array.ctypes.data)


@njit(nogil=True)
def _seen(state, sequence, first, num_rows, context, window):  # type: ignore[no-untyped-def]
    """The first logical slot that one of the rows sees, and the one after the last: their own."""
    begin, positions = context, int64s(state[POSITIONS])
    for row in range(first, first + num_rows):
        begin = min(begin, max(0, positions[row] - window + 1) if window else 0)
    return begin, context - (int32s(state[FIRST_ROWS])[sequence + 1] - first - num_rows)


@njit(nogil=True, error_model="numpy")
def _gather(cache, state, sequence, begin, count, head, key_heads, dim, keys, values, rounds):  # type: ignore[no-untyped-def]
    """Write what is in the logical slots from `begin` on to the addresses `keys` and `values`, in float32: keys as
    panels [4, dim, 16 keys], values as panels [dim / 16, 64, 16]. After `count` slots, values are zeros."""
    size = state[BLOCK_SIZE]
    table = int32s(state[BLOCK_TABLES] + 4 * sequence * state[TABLE_WIDTH])
    item = 2 if rounds else 4
    places = np.empty(_KEYS, np.int64)
    for index in range(_KEYS):
        logical = begin + min(index, count - 1)
        slot = np.int64(table[logical // size]) * size + logical % size
        places[index] = item * (slot * key_heads + head) * dim
    for index in range(count):
        for panel in range(dim // PANEL):
            source, target = places[index] + item * panel * PANEL, values + 4 * PANEL * (panel * _KEYS + index)
            if rounds:
                widen_lanes(cache[1] + source, target)
            else:
                copy_lanes(cache[1] + source, target)
    if count < _KEYS:
        rest = carray(floats(values), (dim // PANEL, _KEYS, PANEL))
        rest[:, count:] = np.float32(0.0)
    for first in range(0, count, PANEL):
        for panel in range(dim // PANEL):
            target = keys + 4 * PANEL * (first // PANEL * dim + panel * PANEL)
            if rounds:
                turn_halves(_at(places) + 8 * first, cache[0] + item * panel * PANEL, target)
            else:
                turn_floats(_at(places) + 8 * first, cache[0] + item * panel * PANEL, target)
    keep_alive(places)


@njit(nogil=True)
def _hide(scores, state, sequence, first, num_rows, shared, begin, count, window):  # type: ignore[no-untyped-def]
    """-inf for what the rows do not see of slots begin .. begin + count - 1. scores: float32 [queries, 64]."""
    ends, positions = int32s(state[VISIBLE_ENDS]), int64s(state[POSITIONS])
    words, start = state[WORDS], int32s(state[TREE_STARTS])[sequence]
    node_positions = int32s(state[NODE_POSITIONS] + 4 * sequence * 64 * words)
    for own in range(num_rows):
        row = first + own
        low, end = max(0, positions[row] - window + 1) if window else 0, ends[row]
        if low <= begin and begin + count <= end:
            continue
        ancestors = int64s(state[ANCESTORS] + 8 * row * words)
        for index in range(count):
            slot = begin + index
            is_visible = low <= slot < end
            if slot >= max(start, end):
                node = slot - start
                is_visible = (ancestors[node // 64] >> (node % 64)) & 1 == 1 and (
                    window == 0 or positions[row] - node_positions[node] < window
                )
            if not is_visible:
                for query in range(own * shared, (own + 1) * shared):
                    scores[query, index] = np.float32(-np.inf)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _weigh(scores, highest, totals, sums):  # type: ignore[no-untyped-def]
    """Scores [queries, 64] become weights relative to the highest so far; totals and sums are brought to it.

    All 64 are added up in one order, so that a total does not depend on how many of them other rows see.
    """
    for query in range(len(highest)):
        place = _at(scores) + 4 * _KEYS * query
        top = largest(place, _KEYS, highest[query])
        factor = exponential(highest[query] - top)
        totals[query] = totals[query] * factor + weigh(place, _KEYS, top, _HIDDEN)
        highest[query] = top
        if factor != np.float32(1.0):
            for d in range(sums.shape[1]):
                sums[query, d] *= factor
