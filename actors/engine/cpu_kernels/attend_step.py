"""Attention of a decoder layer on CPU, as a step for `run_steps`: all sequences, draft trees and long prompts alike.

Keys and values are read block by block with the softmax of Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018, as in FlashAttention; products are those of `microkernel`. Query heads that share a key head are further
rows of one product. A row whose visible slots are contiguous has the same bits in any company.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import carray, njit

from actors.engine.cpu_kernels.addresses import call, floats, int32s, int64s
from actors.engine.cpu_kernels.bfloat16 import copy_lanes, rounded, widen_lanes
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
    SEQUENCES,
    TABLE_WIDTH,
    TREE_STARTS,
    VISIBLE_ENDS,
    WORDS,
)
from actors.engine.cpu_kernels.layer_steps import exponential, store
from actors.engine.cpu_kernels.microkernel import PANEL
from actors.engine.cpu_kernels.threads import num_threads, thread_num

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
    queries = num_rows * shared
    panels = (queries + PANEL - 1) // PANEL
    lanes = panels * PANEL
    query_panels = _query_panels(
        state[PRODUCTS] + 4 * (first * stride + head * shared * dim), stride, num_rows, shared, dim, lanes, scale
    )
    keys, values = np.empty((_KEYS, dim), np.float32), np.empty((dim // PANEL) * _KEYS * PANEL, np.float32)
    scores, weights = np.empty((_KEYS, lanes), np.float32), np.empty(queries * _KEYS, np.float32)
    sums = np.zeros((queries, dim), np.float32)
    highest, totals = np.full(lanes, np.float32(-np.inf)), np.zeros(lanes, np.float32)
    factors = np.empty(lanes, np.float32)
    scoring, summing = np.empty(8, np.int64), np.empty(8, np.int64)
    scoring[:] = (_at(keys), 0, dim, _at(query_panels), _at(scores), lanes, 0, panels)
    summing[:] = (_at(weights), queries, 0, _at(values), _at(sums), dim, 0, dim // PANEL)
    begin, end = _seen(state, sequence, first, num_rows, context, window)
    for block in range(begin // _KEYS * _KEYS, end, _KEYS):
        count = min(_KEYS, end - block)
        _gather(cache, state, sequence, block, count, head, key_heads, dim, _at(keys), _at(values), rounds)
        scores[:count] = np.float32(0.0)
        scoring[1] = summing[2] = count
        call(product, _at(scoring))
        _hide(scores, state, sequence, first, num_rows, shared, block, count, window)
        _weigh(scores, highest, totals, factors, count)
        _turn(scores, factors, weights, sums, count)
        call(product, _at(summing))
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
def _query_panels(address, stride, num_rows, shared, dim, lanes, scale):  # type: ignore[no-untyped-def]
    """Scaled queries of some rows as panels, float32 [lanes / 16, dim, 16]."""
    panels = np.zeros((lanes // PANEL, dim, PANEL), np.float32)
    for own in range(num_rows):
        rows = carray(floats(address + 4 * own * stride), (shared, dim))
        for group in range(shared):
            lane = own * shared + group
            for d in range(dim):
                panels[lane // PANEL, d, lane % PANEL] = rows[group, d] * scale
    return panels


@njit(nogil=True)
def _seen(state, sequence, first, num_rows, context, window):  # type: ignore[no-untyped-def]
    """The first logical slot that one of the rows sees, and the one after the last: their own."""
    begin, positions = context, int64s(state[POSITIONS])
    for row in range(first, first + num_rows):
        begin = min(begin, max(0, positions[row] - window + 1) if window else 0)
    return begin, context - (int32s(state[FIRST_ROWS])[sequence + 1] - first - num_rows)


@njit(nogil=True, error_model="numpy")
def _gather(cache, state, sequence, begin, count, head, key_heads, dim, keys, values, rounds):  # type: ignore[no-untyped-def]
    """Write keys [count, dim], and values in panels [dim / 16, count, 16], of logical slots from `begin` on to the
    addresses `keys` and `values`, in float32."""
    size = state[BLOCK_SIZE]
    table = int32s(state[BLOCK_TABLES] + 4 * sequence * state[TABLE_WIDTH])
    index = 0
    while index < count:
        offset = (begin + index) % size
        slot = np.int64(table[(begin + index) // size]) * size + offset
        for _ in range(min(count - index, size - offset)):
            place = (slot * key_heads + head) * dim
            for panel in range(dim // PANEL):
                source, target = place + panel * PANEL, 4 * PANEL * (panel * count + index)
                if rounds:
                    widen_lanes(cache[0] + 2 * source, keys + 4 * (index * dim + panel * PANEL))
                    widen_lanes(cache[1] + 2 * source, values + target)
                else:
                    copy_lanes(cache[0] + 4 * source, keys + 4 * (index * dim + panel * PANEL))
                    copy_lanes(cache[1] + 4 * source, values + target)
            index += 1
            slot += 1


@njit(nogil=True)
def _hide(scores, state, sequence, first, num_rows, shared, begin, count, window):  # type: ignore[no-untyped-def]
    """-inf for what the rows do not see of slots begin .. begin + count - 1. scores: float32 [count, queries]."""
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
                scores[index, own * shared : (own + 1) * shared] = np.float32(-np.inf)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _weigh(scores, highest, totals, factors, count):  # type: ignore[no-untyped-def]
    """Scores [count, queries] become weights relative to the highest so far. Totals are brought to it; sums of before
    are to be multiplied with `factors`."""
    queries = len(highest)
    for query in range(queries):
        factors[query] = highest[query]
    for index in range(count):
        for query in range(queries):
            highest[query] = max(highest[query], scores[index, query])
    for query in range(queries):
        highest[query] = max(highest[query], _HIDDEN)
        factors[query] = exponential(factors[query] - highest[query])
        totals[query] *= factors[query]
    for index in range(count):
        for query in range(queries):
            weight = exponential(scores[index, query] - highest[query])
            scores[index, query] = weight if scores[index, query] > _HIDDEN else np.float32(0.0)
            totals[query] += scores[index, query]


@njit(nogil=True)
def _turn(scores, factors, weights, sums, count):  # type: ignore[no-untyped-def]
    """Weights of each query in a row, and its sum brought to the highest score so far."""
    for query in range(len(sums)):
        sums[query] *= factors[query]
        for index in range(count):
            weights[query * count + index] = scores[index, query]
