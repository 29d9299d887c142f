"""The largest logits of rows, on a CPU in a pass or two over each."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from actors.sampling.exponential import exponential

_BLOCK = 128  # columns whose largest is kept
_LARGEST, _INFINITY = 2**31 - 1, 0x7F800000


def argmax(logits: Tensor) -> Tensor:
    """int64 [R], the lowest of equals. logits: [R, V], on any device."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    ids, _ = _top(logits, 1, False)
    return torch.from_numpy(ids[:, 0].astype(np.int64))


def most_probable(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest next tokens of each row, int32, and their probabilities, float32, [R, count or V], likeliest first.
    logits: [R, V], on any device."""
    count = min(count, logits.shape[1])
    if logits.device.type != "cpu":
        logits = logits.float()
        top = logits.topk(count, dim=-1)
        return top.indices.to(torch.int32), (top.values - logits.logsumexp(dim=-1, keepdim=True)).exp_()
    ids, probs = _top(logits, count, True)
    return torch.from_numpy(ids), torch.from_numpy(probs)


def _top(logits: Tensor, count: int, weighs: bool) -> tuple[np.ndarray, np.ndarray]:
    """Columns, int32, of the largest logits, [R, count], largest first, and their probabilities, float32, if weighs."""
    rows = logits.detach().float().contiguous().numpy()
    ids, probs = np.empty((len(rows), count), np.int32), np.empty((len(rows), count), np.float32)
    _fill(rows, ids, probs, weighs)
    return ids, probs


@njit(cache=True, nogil=True)
def _fill(rows, ids, probs, weighs):  # type: ignore[no-untyped-def]
    bits = rows.view(np.int32)
    maxima = np.empty((rows.shape[1] + _BLOCK - 1) // _BLOCK, np.int32)
    for index in range(len(rows)):
        for block in range(len(maxima)):
            maxima[block] = _largest(bits[index], block * _BLOCK, min(rows.shape[1], (block + 1) * _BLOCK))
        last, place = np.int32(_LARGEST), -1
        for rank in range(ids.shape[1]):
            if rank:  # without those that were taken
                maxima[place // _BLOCK] = _next(bits[index], place // _BLOCK, last, place)[0]
            last, place = _next(bits[index], np.argmax(maxima), last, place)
            ids[index, rank] = place
        if weighs:
            largest = rows[index, ids[index, 0]]
            mass = _mass(rows[index], largest)
            for rank in range(ids.shape[1]):
                probs[index, rank] = np.exp(rows[index, ids[index, rank]] - largest) / mass


@njit(cache=True, nogil=True)
def order_of(bits):  # type: ignore[no-untyped-def]
    """int32 in the order of the float32 with these bits, so that loops are vectorized. Both zeros are equal, and NaN is
    the largest, as for torch."""
    magnitude = np.int32(bits & _LARGEST)
    order = np.int32(magnitude ^ np.int32(bits >> 31)) - np.int32(bits >> 31)
    return np.int32(_LARGEST if magnitude > _INFINITY else order)


@njit(cache=True, nogil=True)
def _next(bits, block, last, place):  # type: ignore[no-untyped-def]
    """The largest of a block that comes after (last, place), where equals are in the order of columns; its column."""
    largest, found = np.int32(-_LARGEST - 1), block * _BLOCK
    for column in range(block * _BLOCK, min(len(bits), (block + 1) * _BLOCK)):
        number = order_of(bits[column])
        if (number < last or (number == last and column > place)) and number > largest:
            largest, found = number, column
    return largest, found


@njit(cache=True, nogil=True)
def _largest(bits, begin, end):  # type: ignore[no-untyped-def]
    largest = np.int32(-_LARGEST - 1)
    for column in range(begin, end):
        largest = np.int32(max(largest, order_of(bits[column])))
    return largest


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _mass(row, largest):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for column in range(len(row)):
        total += exponential(row[column] - largest)
    return total
