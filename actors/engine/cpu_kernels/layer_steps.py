"""The steps of a decoder layer on CPU, as compiled functions for `run_steps`.

Each reads its own fields from int64 numbers, of which the first is the address of a `layer_state`, and does one
thread's share. Numbers between steps are float32 in the buffers of the state; in a model in bfloat16 they are rounded
where its operators would round them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numba import carray, njit

from actors.engine.cpu_kernels.addresses import floats, halves, int64s, run_steps
from actors.engine.cpu_kernels.entry_points import SOURCES, entry_point
from actors.engine.cpu_kernels.layer_state import (
    ANGLES_AT,
    CACHE,
    COSINES,
    HIDDEN,
    INPUTS,
    LOGITS,
    NUM_WANTED,
    PRODUCTS,
    ROTATED,
    ROWS,
    SINES,
    SLOTS,
    TOKEN_IDS,
    WANTED,
)
from actors.engine.cpu_kernels.numbers import narrowed, rounded, widened
from actors.engine.cpu_kernels.panel_linear import multiply_share
from actors.engine.cpu_kernels.threads import num_threads, openmp, thread_num
from actors.sampling.exponential import exponential

_FAST = {"reassoc", "contract", "nsz"}


@lru_cache
def runner() -> tuple[Any, int]:
    """`openmp`, and the address of `run_steps`."""
    sources = SOURCES

    def run(program):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        run_steps(program)

    return openmp(), entry_point(run)


@lru_cache
def embed(is_half: bool) -> int:
    """hidden = embeddings of the tokens. Fields: state, width, address of the embeddings, float32 or bfloat16."""
    sources = SOURCES

    def share(work):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        state, width = int64s(work[0]), work[1]
        rows, thread, threads, token_ids = state[ROWS], thread_num(), num_threads(), int64s(state[TOKEN_IDS])
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            hidden, first = carray(floats(state[HIDDEN] + 4 * row * width), (width,)), token_ids[row] * width
            if is_half:
                bits = carray(halves(work[2] + 2 * first), (width,))
                for index in range(width):
                    hidden[index] = widened(bits[index])
            else:
                hidden[:] = carray(floats(work[2] + 4 * first), (width,))

    return entry_point(share)


@lru_cache
def normalize_wanted(rounds: bool) -> int:
    """inputs = the normalized hidden states of the rows with logits. Fields: state, width, weight, bits of eps in
    float32, whether inputs are halves."""
    sources = SOURCES

    def share(work):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        state, width, is_half, eps = int64s(work[0]), work[1], work[4] == 1, np.int32(work[3]).view(np.float32)
        count, thread, threads, wanted = state[NUM_WANTED], thread_num(), num_threads(), int64s(state[WANTED])
        normalized = np.empty(width, np.float32)
        for index in range(count * thread // threads, count * (thread + 1) // threads):
            normalized[:] = carray(floats(state[HIDDEN] + 4 * wanted[index] * width), (width,))
            _normalize(normalized, carray(floats(work[2]), (width,)), eps, rounds)
            store(state[INPUTS], index * width, normalized, is_half)

    return entry_point(share)


@lru_cache
def multiply_wanted() -> int:
    """logits = inputs times weights, for the rows with logits. Fields as of `multiply_panels`."""
    sources = SOURCES

    def share(work):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        state = int64s(work[0])
        multiply_share(
            state[INPUTS], state[NUM_WANTED], state[LOGITS], work[1], work[2], work[3], work[4], work[5], work[6]
        )

    return entry_point(share)


@lru_cache
def add_and_normalize(rounds: bool) -> int:
    """hidden += products, if there are any; inputs = the normalized sum, if there is a norm.

    Fields: state, width, stride of the products (0: there are none), weight (0: no norm), bits of eps in float32,
    whether inputs are halves.
    """
    sources = SOURCES

    def share(work):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        state, width, stride, weight, is_half = int64s(work[0]), work[1], work[2], work[3], work[5] == 1
        eps = np.int32(work[4]).view(np.float32)
        rows, thread, threads = state[ROWS], thread_num(), num_threads()
        normalized = np.empty(width, np.float32)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            hidden = carray(floats(state[HIDDEN] + 4 * row * width), (width,))
            if stride:
                _add(hidden, carray(floats(state[PRODUCTS] + 4 * row * stride), (width,)), rounds)
            if weight:
                normalized[:] = hidden
                _normalize(normalized, carray(floats(weight), (width,)), eps, rounds)
                store(state[INPUTS], row * width, normalized, is_half)

    return entry_point(share)


@lru_cache
def multiply_panels() -> int:
    """products = inputs times weights, as `multiply_share` has it. Fields: state, items of a row, weights, panels,
    bias, scales, and the address of `multiply`."""
    sources = SOURCES

    def share(work):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        state = int64s(work[0])
        multiply_share(
            state[INPUTS], state[ROWS], state[PRODUCTS], work[1], work[2], work[3], work[4], work[5], work[6]
        )

    return entry_point(share)


@lru_cache
def gate(rounds: bool) -> int:
    """inputs = silu of the first half of the products, times the second half. Fields: state, width, stride of the
    products, whether inputs are halves."""
    sources = SOURCES

    def share(work):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        state, width, stride, is_half = int64s(work[0]), work[1], work[2], work[3] == 1
        thread, threads = thread_num(), num_threads()
        first, last = width * thread // threads, width * (thread + 1) // threads
        outputs = np.empty(last - first, np.float32)
        for row in range(state[ROWS]):
            products = carray(floats(state[PRODUCTS] + 4 * row * stride), (stride,))
            _gate(products[first:last], products[width + first : width + last], outputs, rounds)
            store(state[INPUTS], row * width + first, outputs, is_half)

    return entry_point(share)


@lru_cache
def rotate(rounds: bool) -> int:
    """Rotate queries and keys in the products (RoPE, Su et al., 2021), and write keys and values into the cache.

    Fields: state, heads, key heads, head dim, stride of the products, layer, weights of norms of queries and keys (0:
    none), bits of their eps in float32. The cache holds bfloat16 where it rounds, and finite numbers alone (`KvCache`).
    """
    sources = SOURCES

    def share(work):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        state, heads, key_heads, dim, stride = int64s(work[0]), work[1], work[2], work[3], work[4]
        cache, rotated = int64s(state[CACHE] + 16 * work[5]), state[ROTATED]
        eps = np.int32(work[8]).view(np.float32)
        rows, thread, threads, slots = state[ROWS], thread_num(), num_threads(), int64s(state[SLOTS])
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            products = carray(floats(state[PRODUCTS] + 4 * row * stride), (heads + 2 * key_heads, dim))
            angle = 4 * rotated * int64s(state[ANGLES_AT])[row]
            cosines = carray(floats(state[COSINES] + angle), (rotated,))
            sines = carray(floats(state[SINES] + angle), (rotated,))
            if rounds:
                for head in range(len(products)):
                    for index in range(dim):
                        products[head, index] = rounded(products[head, index])
            for head in range(heads + key_heads):
                weight = work[6] if head < heads else work[7]
                if weight:
                    _normalize(products[head], carray(floats(weight), (dim,)), eps, rounds)
                _turn(products[head], cosines, sines, rounds)
            place = slots[row] * key_heads * dim
            for head in range(key_heads):
                for part, numbers in enumerate((products[heads + head], products[heads + key_heads + head])):
                    _make_finite(numbers)
                    store(cache[part], place + head * dim, numbers, rounds)

    return entry_point(share)


@njit(nogil=True)
def _make_finite(numbers: np.ndarray) -> None:
    for index in range(len(numbers)):
        if not abs(numbers[index]) < np.float32(np.inf):
            numbers[index] = np.float32(0.0)


@njit(nogil=True)
def store(address: int, first: int, values: np.ndarray, is_half: bool) -> None:
    """Write float32 numbers at place `first` of an array of float32 or bfloat16."""
    if is_half:
        bits = carray(halves(address + 2 * first), (len(values),))
        for index in range(len(values)):
            bits[index] = narrowed(values[index])
    else:
        numbers = carray(floats(address + 4 * first), (len(values),))
        for index in range(len(values)):
            numbers[index] = values[index]


# Loops with divisions need numpy's error model: with a check for zero they are not vectorized.
@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _normalize(row: np.ndarray, weight: np.ndarray, eps: np.float32, rounds: bool) -> None:
    """As `RmsNorm`, in place. float32 [width] each."""
    total = np.float32(0.0)
    for index in range(len(row)):
        total += row[index] * row[index]
    scale = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(len(row)) + eps))
    if rounds:
        for index in range(len(row)):
            row[index] = rounded(weight[index] * rounded(row[index] * scale))
    else:
        for index in range(len(row)):
            row[index] = weight[index] * (row[index] * scale)


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _add(hidden: np.ndarray, products: np.ndarray, rounds: bool) -> None:
    if rounds:
        for index in range(len(hidden)):
            hidden[index] = rounded(hidden[index] + rounded(products[index]))
    else:
        for index in range(len(hidden)):
            hidden[index] += products[index]


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _gate(gates: np.ndarray, values: np.ndarray, outputs: np.ndarray, rounds: bool) -> None:
    if rounds:
        for index in range(len(gates)):
            number = rounded(gates[index])
            number = rounded(number / (np.float32(1.0) + exponential(min(-number, np.float32(80.0)))))
            outputs[index] = rounded(number * rounded(values[index]))
    else:
        for index in range(len(gates)):
            number = gates[index] / (np.float32(1.0) + exponential(min(-gates[index], np.float32(80.0))))
            outputs[index] = number * values[index]


@njit(nogil=True, fastmath=_FAST, error_model="numpy")
def _turn(head: np.ndarray, cosines: np.ndarray, sines: np.ndarray, rounds: bool) -> None:
    half = len(cosines) // 2
    for index in range(half):
        low, high = head[index], head[index + half]
        turned_low, turned_high = low * cosines[index], high * cosines[index + half]
        if rounds:
            head[index] = rounded(rounded(turned_low) + rounded(-high * sines[index]))
            head[index + half] = rounded(rounded(turned_high) + rounded(low * sines[index + half]))
        else:
            head[index] = turned_low - high * sines[index]
            head[index + half] = turned_high + low * sines[index + half]
