"""RMS norms (Zhang and Sennrich, 2019) in one pass a row instead of eight operations."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor, nn

from actors.engine.cpu_kernels.addresses import floats, halves
from actors.engine.cpu_kernels.entry_points import SOURCES, entry_point
from actors.engine.cpu_kernels.numbers import narrowed, widened
from actors.engine.cpu_kernels.threads import has_openmp, num_threads, openmp, thread_num

_CHECKED_ROWS = 8
# Relative; sums of squares are added up in another order
_TOLERANCES = {torch.float32: 4 * 2.0**-23, torch.bfloat16: 2.0**-7}
_MOST_OTHERS = 0.001


class RmsNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) on CPU, in float32 or bfloat16. In bfloat16 the mean is taken in float32, and
    the quotient is rounded before it is multiplied."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._run, self._share = openmp(), share_of_rows(weight.dtype == torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        rows = inputs.contiguous()
        outputs = torch.empty_like(rows)
        width = len(self.weight)
        work = _Work(
            rows.data_ptr(), outputs.data_ptr(), self.weight.data_ptr(), rows.numel() // width, width, self.eps
        )
        self._run(self._share, ctypes.byref(work), torch.get_num_threads(), 0)
        return outputs


@torch.inference_mode()
def replace_norms(model: nn.Module) -> None:
    """Replace the RMS norms of a CPU model in place: modules so named that give the same outputs."""
    if not has_openmp():
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            eps = eps_of(child)
            if eps is not None and child.weight.device.type == "cpu":
                norm = RmsNorm(child.weight.detach(), eps)
                if agree(child, norm):
                    setattr(module, name, norm)


def eps_of(module: nn.Module) -> float | None:
    """None: not an RMS norm, or not one that can be replaced."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    weights = list(module.parameters())
    if len(weights) != 1 or module._forward_hooks or module._forward_pre_hooks:
        return None
    weight = weights[0]
    is_plain = type(weight.data) is Tensor and weight is getattr(module, "weight", None)
    return eps if is_plain and weight.ndim == 1 and weight.dtype in _TOLERANCES else None


def agree(module: nn.Module, norm: nn.Module) -> bool:
    """Whether both give the same outputs, but for rounding. norm: with the module's weight."""
    dtype, device = norm.weight.dtype, norm.weight.device
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, _CHECKED_ROWS, len(norm.weight), generator=generator)
    inputs *= torch.logspace(-3, 3, _CHECKED_ROWS).unsqueeze(-1)  # small rows show eps
    inputs = inputs.to(device, dtype)
    expected, found = module(inputs), norm(inputs)
    if expected.shape != inputs.shape or expected.dtype != dtype:
        return False
    # In bfloat16 few outputs are near enough to a border between two numbers to be rounded otherwise.
    is_like = dtype == torch.float32 or int((expected != found).sum()) <= _MOST_OTHERS * expected.numel() + 1
    return is_like and torch.allclose(found.float(), expected.float(), rtol=_TOLERANCES[dtype], atol=0.0)


class _Work(ctypes.Structure):
    """Arguments of one call, as `share` reads them."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "weight", "rows", "width")),
        ("eps", ctypes.c_double),
    ]


@njit(nogil=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _normalize(inputs: np.ndarray, weight: np.ndarray, eps: float, outputs: np.ndarray) -> None:
    """float32 [width] each."""
    total = np.float32(0.0)
    for index in range(len(inputs)):
        total += inputs[index] * inputs[index]
    scale = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(len(inputs)) + np.float32(eps)))
    for index in range(len(inputs)):
        outputs[index] = weight[index] * (inputs[index] * scale)


@njit(nogil=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _normalize_bfloat16(inputs: np.ndarray, weight: np.ndarray, eps: float, outputs: np.ndarray) -> None:
    """The bits of bfloat16, uint16 [width] each."""
    total = np.float32(0.0)
    for index in range(len(inputs)):
        total += widened(inputs[index]) * widened(inputs[index])
    scale = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(len(inputs)) + np.float32(eps)))
    for index in range(len(inputs)):
        quotient = widened(narrowed(widened(inputs[index]) * scale))
        outputs[index] = narrowed(widened(weight[index]) * quotient)


@lru_cache
def share_of_rows(is_bfloat16: bool) -> int:
    """Address of a compiled function that does one thread's share of a `_Work`."""
    sources = SOURCES

    def share(work):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        rows, width, eps = work[3], work[4], np.int64(work[5]).view(np.float64)
        thread, threads = thread_num(), num_threads()
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            if is_bfloat16:
                place, shape = 2 * row * width, (width,)
                weight = carray(halves(work[2]), shape)
                _normalize_bfloat16(
                    carray(halves(work[0] + place), shape), weight, eps, carray(halves(work[1] + place), shape)
                )
            else:
                place, shape = 4 * row * width, (width,)
                weight32 = carray(floats(work[2]), shape)
                _normalize(
                    carray(floats(work[0] + place), shape), weight32, eps, carray(floats(work[1] + place), shape)
                )

    return entry_point(share)
