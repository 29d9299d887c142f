"""Linear layers whose weights are stored in panels for `microkernel`."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor, nn

from actors.engine.cpu_kernels.addresses import call, floats, keep_alive
from actors.engine.cpu_kernels.entry_points import SOURCES, entry_point
from actors.engine.cpu_kernels.microkernel import (
    BFLOAT16,
    BFLOAT16_PAIRS,
    FLOAT16,
    FLOAT32,
    INPUTS_OF_ITEM,
    INT8,
    PANEL,
    compiled_features,
    multiply,
)
from actors.engine.cpu_kernels.threads import num_threads, openmp, thread_num

_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
DTYPES = tuple(_KINDS)
_TOGETHER = 12  # panels, so that each thread's are whole blocks of four, three or two


class PanelLinear(nn.Module):
    """y = x W^T + b on CPU. Products are summed in float32, whatever the dtype of weights and inputs.

    float32 weights that come from a checkpoint of 16 bits are stored so: half the bytes to read, and the same result.
    """

    def __init__(self, linear: nn.Linear, ahead_bytes: int = 0, *, rounds_inputs: bool = False) -> None:
        """ahead_bytes: see `make_multiply`. rounds_inputs: multiply bfloat16 weights with inputs in bfloat16. Raises
        RuntimeError where the processor cannot."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        # Empty, kept for its dtype: T5 and other models ask a layer which dtype its inputs must have.
        self.weight = weight.new_empty(0)
        self._bias = None
        if linear.bias is not None:
            self._bias = nn.functional.pad(linear.bias.detach().float(), (0, -self.out_features % PANEL))
        self._panels, kind = lay_out(weight, rounds_inputs)
        self._input_dtype = torch.bfloat16 if rounds_inputs else torch.float32
        self._depth = self._panels.shape[1]
        self._missing_inputs = self._depth * INPUTS_OF_ITEM[kind] - self.in_features
        self._width = len(self._panels) * PANEL
        self._run, self._share = openmp(), share_of_panels()
        bias = 0 if self._bias is None else self._bias.data_ptr()
        self._fields = self._panels.data_ptr(), len(self._panels), bias, multiply(kind, ahead_bytes)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of the inputs."""
        rows = inputs.to(self._input_dtype)
        rows = nn.functional.pad(rows, (0, self._missing_inputs)) if self._missing_inputs else rows.contiguous()
        outputs = rows.new_empty((*inputs.shape[:-1], self._width), dtype=torch.float32)
        weights, panels, bias, multiply = self._fields
        work = Work(
            rows.data_ptr(), rows.numel() // rows.shape[-1], self._depth, weights, outputs.data_ptr(), panels, bias, 0,
            multiply,
        )  # fmt: skip
        self._run(self._share, ctypes.byref(work), torch.get_num_threads(), 0)
        if self._width != self.out_features:
            outputs = outputs[..., : self.out_features]
        return outputs.to(inputs.dtype)


def lay_out(weight: Tensor, rounds_inputs: bool) -> tuple[Tensor, int]:
    """Panels of a weight [out_features, in_features] and their format. rounds_inputs: for inputs in bfloat16. Raises
    RuntimeError where the processor or the weight has no such products."""
    if rounds_inputs:
        if weight.dtype != torch.bfloat16 or not has_bfloat16_pairs():
            raise RuntimeError("no products of pairs in bfloat16")
        return to_pair_panels(weight), BFLOAT16_PAIRS
    if weight.dtype == torch.int8:
        return to_panels(weight), INT8
    weight = _narrowed(weight)
    return to_pair_panels(weight) if weight.dtype == torch.bfloat16 else to_panels(weight), _KINDS[weight.dtype]


def to_panels(weight: Tensor) -> Tensor:
    """[out_features, in_features] -> [panels, in_features, PANEL], with zeros for outputs that are missing."""
    padded = nn.functional.pad(weight, (0, 0, 0, -len(weight) % PANEL))
    return padded.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def to_pair_panels(weight: Tensor) -> Tensor:
    """[out_features, in_features] -> [panels, in_features / 2, PANEL, 2], likewise, also for a missing input."""
    padded = nn.functional.pad(weight, (0, weight.shape[1] % 2, 0, -len(weight) % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


def _narrowed(weight: Tensor) -> Tensor:
    if weight.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            narrow = weight.to(dtype)
            if torch.equal(narrow.float(), weight):
                return narrow
    return weight


class Work(ctypes.Structure):
    """One product, as `multiply_share` has it."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("inputs", "rows", "depth", "weights", "outputs", "panels", "bias", "scales", "multiply")
    ]


def has_bfloat16_pairs() -> bool:
    """Whether compiled functions may use AVX512-BF16."""
    return bool(compiled_features().get("avx512bf16"))


@lru_cache
def share_of_panels() -> int:
    """Address of a compiled function that computes one thread's share of a `Work`."""
    sources = SOURCES

    def share(work):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        multiply_share(work[0], work[1], work[2], work[3], work[4], work[5], work[6], work[7], work[8])

    return entry_point(share)


@njit(nogil=True)
def multiply_share(inputs, rows, depth, weights, outputs, panels, bias, scales, multiply):  # type: ignore[no-untyped-def]
    """One thread's share of outputs [rows, 16 panels] = products + bias, or products * scales + bias (0: none).
    Addresses, and numbers."""
    thread, threads, width = thread_num(), num_threads(), panels * PANEL
    size = -(-panels // (_TOGETHER * threads)) * _TOGETHER
    first, last = min(panels, thread * size), min(panels, (thread + 1) * size)
    count = (last - first) * PANEL
    for row in range(rows):
        own = carray(floats(outputs + 4 * (row * width + first * PANEL)), (count,))
        if bias and not scales:
            own[:] = carray(floats(bias + 4 * first * PANEL), (count,))
        else:
            own[:] = np.float32(0.0)
    work = np.array([inputs, rows, depth, weights, outputs, width, first, last])
    call(multiply, work.ctypes.data)
    keep_alive(work)
    if scales:
        for row in range(rows):
            own = carray(floats(outputs + 4 * (row * width + first * PANEL)), (count,))
            own *= carray(floats(scales + 4 * first * PANEL), (count,))
            if bias:
                own += carray(floats(bias + 4 * first * PANEL), (count,))
