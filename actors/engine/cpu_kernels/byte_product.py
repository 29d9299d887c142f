"""Products of rows with weights in 8 bits on CPU by products of bytes, as `quantization.Product`.

A row becomes 16-bit fixed point, whose high and low bytes are two rows of one product of bytes, summed up in integers,
which processors with such instructions do fast for many rows. A row's result does not depend on its company.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numba import njit
from torch import Tensor

_HALF = 128  # zero point of the bytes
_FIXED_MAX = 257 * 127  # largest 16-bit value whose high and low byte both fit after centring
_SMALLEST = 1e-30  # rows below are zeros
_MAX_INPUTS = 2**31 // (255 * 127)  # sums of more products may leave 32 bits
_CHECKED_OUTPUTS = 16


class ByteProduct:
    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        """weight: int8 [out_features, in_features]. scales: float32 [out_features]. Raises RuntimeError where this
        processor has no such product for the shape."""
        if not has_byte_product() or weight.shape[1] > _MAX_INPUTS:
            raise RuntimeError("no product of bytes")
        self._packed = torch.ops.onednn.qlinear_prepack(weight, None)
        self._scales, self._zeros = scales, torch.zeros(len(weight), dtype=torch.int64)

    def __call__(self, rows: Tensor) -> Tensor:
        return _byte_product(rows, self._packed, self._scales, self._zeros)


@lru_cache(maxsize=1)
def has_byte_product() -> bool:
    """Whether this processor multiplies bytes without saturating. Without 32-bit accumulation (VNNI), sums of two
    products stop at 16 bits, so the largest there are tell it."""
    if not torch.backends.mkldnn.is_available():
        return False
    signs = torch.ones(_CHECKED_OUTPUTS, 64)
    signs[1::2] = -1
    weight = (127 * signs).to(torch.int8)
    scales, zeros = torch.ones(_CHECKED_OUTPUTS), torch.zeros(_CHECKED_OUTPUTS, dtype=torch.int64)
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        rows = torch.stack([torch.ones(64), -torch.ones(64), torch.linspace(-1, 1, 64)])
        output = _byte_product(rows, packed, scales, zeros)
    except (RuntimeError, AttributeError):
        return False
    return torch.allclose(output, rows @ weight.float().T, rtol=1e-4, atol=0.1)


def _byte_product(rows: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """float32 [n, in_features] -> [n, out_features]: 2 n rows of bytes in one product."""
    halves = np.empty((2 * len(rows), rows.shape[1]), dtype=np.uint8)
    steps = np.empty(len(rows), dtype=np.float32)
    _split_rows(rows.contiguous().numpy(), halves, steps)
    products = torch.ops.onednn.qlinear_pointwise(
        torch.from_numpy(halves), 1.0, _HALF, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    output = torch.empty((len(rows), products.shape[1]))
    _join_rows(products.numpy(), steps, output.numpy())
    return output


@njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def _split_rows(rows: np.ndarray, halves: np.ndarray, steps: np.ndarray) -> None:
    """float32 [n, k] -> uint8 [2 n, k], float32 [n]: x becomes step * (256 * high + low), signed bytes that are stored
    with 128 added, the high ones in the first n rows."""
    count, width = rows.shape
    for row in range(count):
        largest = np.float32(0.0)
        for column in range(width):
            largest = max(largest, abs(rows[row, column]))
        steps[row] = largest / np.float32(_FIXED_MAX)
        inverse = np.float32(_FIXED_MAX) / largest if largest > np.float32(_SMALLEST) else np.float32(0.0)
        for column in range(width):
            # Conversion cuts off, hence 0.5; the rest centres both bytes, 256 * 128 + 128.
            fixed = np.int32(rows[row, column] * inverse + np.float32(257 * _HALF + 0.5))
            halves[row, column] = np.uint8(fixed >> 8)
            halves[count + row, column] = np.uint8(fixed & 255)


@njit(nogil=True, cache=True)
def _join_rows(products: np.ndarray, steps: np.ndarray, output: np.ndarray) -> None:
    """float32 [2 n, m], [n] -> [n, m]"""
    count, width = output.shape
    for row in range(count):
        for column in range(width):
            output[row, column] = (products[row, column] * np.float32(256) + products[count + row, column]) * steps[row]
