"""Linear layers whose weights are stored in panels for `microkernel`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm
import torch
from numba import cfunc, config, types
from torch import Tensor, nn

from actors.engine.cpu_kernels.microkernel import (
    BFLOAT16,
    BFLOAT16_PAIRS,
    FLOAT16,
    FLOAT32,
    PANEL,
    make_multiply,
    panels_at_once,
)
from actors.engine.cpu_kernels.threads import Parallel, num_threads, openmp, thread_num

_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
DTYPES = tuple(_KINDS)


class PanelLinear(nn.Module):
    """y = x W^T + b on CPU. Products are summed in float32, whatever the dtype of weights and inputs.

    float32 weights that come from a checkpoint of 16 bits are stored so: half the bytes to read, and the same result.
    """

    def __init__(self, linear: nn.Linear, ahead_bytes: int = 0) -> None:
        """ahead_bytes: see `make_multiply`."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        # Empty, kept for its dtype: T5 and other models ask a layer which dtype its inputs must have.
        self.weight = weight.new_empty(0)
        self._bias = None
        if linear.bias is not None:
            self._bias = nn.functional.pad(linear.bias.detach().float(), (0, -self.out_features % PANEL))
        self._has_pairs = weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0 and has_bfloat16_pairs()
        self._panels = to_pair_panels(weight) if self._has_pairs else to_panels(_narrowed(weight))
        kind = BFLOAT16_PAIRS if self._has_pairs else _KINDS[self._panels.dtype]
        self._depth = self._panels.shape[1]
        self._weights, self._width = self._panels.data_ptr(), len(self._panels) * PANEL
        self._run, self._share = compiled(kind, ahead_bytes)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of the inputs."""
        rows = inputs.to(torch.bfloat16 if self._has_pairs else torch.float32).contiguous()
        shape = (*inputs.shape[:-1], self._width)
        if self._bias is None:
            outputs = rows.new_zeros(shape, dtype=torch.float32)
        else:
            outputs = rows.new_empty(shape, dtype=torch.float32).copy_(self._bias)
        count = rows.numel() // self.in_features
        if count:
            panels = self._width // PANEL
            work = Work(rows.data_ptr(), count, self._depth, self._weights, outputs.data_ptr(), self._width, panels)
            self._run(self._share, ctypes.byref(work), torch.get_num_threads(), 0)
        if self._width != self.out_features:
            outputs = outputs[..., : self.out_features]
        return outputs.to(inputs.dtype)


def to_panels(weight: Tensor) -> Tensor:
    """[out_features, in_features] -> [panels, in_features, PANEL], with zeros for outputs that are missing."""
    padded = nn.functional.pad(weight, (0, 0, 0, -len(weight) % PANEL))
    return padded.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def to_pair_panels(weight: Tensor) -> Tensor:
    """[out_features, in_features] -> [panels, in_features / 2, PANEL, 2], likewise."""
    padded = nn.functional.pad(weight, (0, 0, 0, -len(weight) % PANEL))
    return padded.view(-1, PANEL, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


def _narrowed(weight: Tensor) -> Tensor:
    if weight.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            narrow = weight.to(dtype)
            if torch.equal(narrow.float(), weight):
                return narrow
    return weight


class Work(ctypes.Structure):
    """Arguments of one product, as `share` reads them."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ("inputs", "rows", "depth", "weights", "outputs", "out_stride", "panels")
    ]


def has_bfloat16_pairs() -> bool:
    """Whether compiled functions may use AVX512-BF16. Numba can be told to compile for another processor."""
    return config.CPU_NAME is None and bool(llvm.get_host_cpu_features().get("avx512bf16"))


_compiled: list[Any] = []  # never freed: layers keep addresses


@lru_cache
def compiled(kind: int, ahead_bytes: int) -> tuple[Parallel, int]:
    """`openmp`, and the address of the compiled function that does one thread's share of a `Work`."""
    run = openmp()
    multiply = make_multiply(kind, *panels_at_once(llvm.get_host_cpu_features()), ahead_bytes)

    @cfunc(types.void(types.CPointer(types.int64)))
    def share(work):  # type: ignore[no-untyped-def]
        panels, thread, threads = work[6], thread_num(), num_threads()
        size = -(-panels // (4 * threads)) * 4
        multiply(work[0], work[1], work[2], work[3], work[4], work[5], thread * size, min(panels, (thread + 1) * size))

    _compiled.append(share)
    return run, share.address
