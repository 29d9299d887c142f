"""Linear layers whose weights are stored in panels for `microkernel`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor, nn

from actors.engine.cpu_kernels.addresses import call, floats, keep_alive
from actors.engine.cpu_kernels.block_weights import BlockWeights, find_blocks, to_code_panels
from actors.engine.cpu_kernels.entry_points import SOURCES, entry_point
from actors.engine.cpu_kernels.microkernel import compiled_features, multiply
from actors.engine.cpu_kernels.threads import num_threads, openmp, thread_num
from actors.engine.cpu_kernels.weight_formats import BFLOAT16, BFLOAT16_PAIRS, FLOAT16, FLOAT32, FORMATS, INT8, PANEL

_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
DTYPES = tuple(_KINDS)
_TOGETHER = 4  # panels of a thread are a multiple, so that few blocks are narrower than they might be


class PanelKernel(NamedTuple):
    """How panels are multiplied."""

    rounds_inputs: bool = False  # weights in bfloat16 with inputs in bfloat16
    ahead_bytes: int = 0  # see `multiply`
    in_blocks: bool = True  # weights that are blocks of codes are stored so


class Panels:
    """Products with a weight in panels, accumulated in float32 for all dtypes of weights and inputs.

    float32 weights are stored in the fewest bits that give them back: 4 or 8 in blocks, or 16. Fewer bytes to read, and
    the same result.
    """

    def __init__(
        self,
        weight: Tensor | BlockWeights,
        kernel: PanelKernel,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> None:
        """weight: [out_features, in_features], in int8 with scales. Bias and scales: [out_features]. Raises
        RuntimeError where the processor or the weight has no such products."""
        out_features, in_features = weight.shape
        self.out_features: int = out_features
        self.weights, kind = _lay_out(weight, kernel)
        self.width = len(self.weights) * PANEL
        self.rounds_inputs = kernel.rounds_inputs
        depth = self.weights.shape[1]
        self.missing_inputs = depth * FORMATS[kind].inputs - in_features
        self._bias, self._scales = self._padded(bias), self._padded(scales)
        self._run, self._share = openmp(), share_of_panels()
        # As `multiply_share` reads them
        self.fields = (
            depth,
            self.weights.data_ptr(),
            len(self.weights),
            0 if self._bias is None else self._bias.data_ptr(),
            0 if self._scales is None else self._scales.data_ptr(),
            multiply(kind, kernel.ahead_bytes),
        )

    def _padded(self, numbers: Tensor | None) -> Tensor | None:
        if numbers is None:
            return None
        return nn.functional.pad(numbers.detach().float(), (0, self.width - self.out_features))

    def __call__(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> float32 [..., out_features]."""
        rows = inputs.to(torch.bfloat16 if self.rounds_inputs else torch.float32)
        rows = nn.functional.pad(rows, (0, self.missing_inputs)) if self.missing_inputs else rows.contiguous()
        outputs = rows.new_empty((*inputs.shape[:-1], self.width), dtype=torch.float32)
        work = Work(rows.data_ptr(), rows.numel() // rows.shape[-1], outputs.data_ptr(), *self.fields)
        self._run(self._share, ctypes.byref(work), torch.get_num_threads(), 0)
        return outputs if self.width == self.out_features else outputs[..., : self.out_features]


_DEFAULT_KERNEL = PanelKernel()


class PanelLinear(nn.Module):
    """y = x W^T + b on CPU."""

    def __init__(
        self, linear: nn.Linear, kernel: PanelKernel = _DEFAULT_KERNEL, blocks: BlockWeights | None = None
    ) -> None:
        """blocks: of the weight, if they are known."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Empty, kept for its dtype: T5 and other models ask a layer which dtype its inputs must have.
        self.weight = linear.weight.detach().new_empty(0)
        self.panels = Panels(blocks or linear.weight.detach(), kernel, linear.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of the inputs."""
        return self.panels(inputs).to(inputs.dtype)


class PanelSlice(nn.Module):
    """A linear layer whose weights are a part of panels. Computes all of their outputs."""

    def __init__(self, panels: Panels, first: int, size: int) -> None:
        super().__init__()
        self._panels, self._own = panels, slice(first, first + size)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., in_features] -> [..., size], in the dtype of the inputs."""
        return self._panels(inputs)[..., self._own].to(inputs.dtype)


def _lay_out(weight: Tensor | BlockWeights, kernel: PanelKernel) -> tuple[Tensor, int]:
    """Panels of a weight [out_features, in_features] and their format. Raises RuntimeError where the processor or the
    weight has no such products."""
    if isinstance(weight, BlockWeights):
        if not has_multiply_add():
            raise RuntimeError("no multiply-add that rounds once")
        return to_code_panels(weight), weight.kind
    if kernel.rounds_inputs:
        if weight.dtype != torch.bfloat16 or not has_bfloat16_pairs():
            raise RuntimeError("no products of pairs in bfloat16")
        return to_pair_panels(weight), BFLOAT16_PAIRS
    if weight.dtype == torch.int8:
        return to_panels(weight), INT8
    blocks = find_blocks(weight) if kernel.in_blocks and has_multiply_add() else None
    if blocks is not None:
        return to_code_panels(blocks), blocks.kind
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
        for name in ("inputs", "rows", "outputs", "depth", "weights", "panels", "bias", "scales", "multiply")
    ]


def has_bfloat16_pairs() -> bool:
    """Whether compiled functions may use AVX512-BF16."""
    return bool(compiled_features().get("avx512bf16"))


def has_multiply_add() -> bool:
    """Whether the processor rounds once when it multiplies and adds."""
    features = compiled_features()
    return bool(features.get("fma") or features.get("neon"))


@lru_cache
def share_of_panels() -> int:
    """Address of a compiled function that computes one thread's share of a `Work`."""
    sources = SOURCES

    def share(work):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        multiply_share(work[0], work[1], work[2], work[3], work[4], work[5], work[6], work[7], work[8])

    return entry_point(share)


@njit(nogil=True)
def multiply_share(inputs, rows, outputs, depth, weights, panels, bias, scales, multiply):  # type: ignore[no-untyped-def]
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
