"""RMS norms (Zhang and Sennrich, 2019) in one pass a row instead of eight operations."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from torch import Tensor, nn

from actors.engine.cpu_kernels.threads import Parallel, has_openmp, num_threads, openmp, thread_num

_CHECKED_ROWS = 8
_TOLERANCE = 4 * 2.0**-23  # relative; sums of squares are added up in another order


class RmsNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) for float32 on CPU."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps
        self._run, self._share = compiled()

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        rows = inputs.contiguous()
        outputs = torch.empty_like(rows)
        width = len(self.weight)
        work = _Work(
            rows.data_ptr(), outputs.data_ptr(), self.weight.data_ptr(), rows.numel() // width, width, self._eps
        )
        self._run(self._share, ctypes.byref(work), torch.get_num_threads(), 0)
        return outputs


@torch.inference_mode()
def replace_norms(model: nn.Module) -> None:
    """Replace the RMS norms of a CPU model in float32 in place: modules so named that give the same outputs."""
    if not has_openmp():
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            if type(child).__name__.endswith("RMSNorm") and isinstance(eps, float) and _is_replaceable(child):
                norm = RmsNorm(child.weight.detach(), eps)
                if _agree(child, norm):
                    setattr(module, name, norm)


def _is_replaceable(module: nn.Module) -> bool:
    weights = list(module.parameters())
    if len(weights) != 1 or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight = weights[0]
    is_plain = type(weight.data) is Tensor and weight is getattr(module, "weight", None)
    return is_plain and weight.ndim == 1 and weight.device.type == "cpu" and weight.dtype == torch.float32


def _agree(module: nn.Module, norm: RmsNorm) -> bool:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, _CHECKED_ROWS, len(norm.weight), generator=generator)
    inputs *= torch.logspace(-3, 3, _CHECKED_ROWS).unsqueeze(-1)  # small rows show eps
    expected = module(inputs)
    return expected.shape == inputs.shape and torch.allclose(norm(inputs), expected, rtol=_TOLERANCE, atol=0.0)


class _Work(ctypes.Structure):
    """Arguments of one call, as `share` reads them."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "weight", "rows", "width")),
        ("eps", ctypes.c_double),
    ]


@intrinsic
def _floats(context, address):  # type: ignore[no-untyped-def]
    """float32 at an address."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _normalize(inputs: np.ndarray, weight: np.ndarray, eps: float, outputs: np.ndarray) -> None:
    """float32 [width] each."""
    total = np.float32(0.0)
    for index in range(len(inputs)):
        total += inputs[index] * inputs[index]
    scale = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(len(inputs)) + np.float32(eps)))
    for index in range(len(inputs)):
        outputs[index] = weight[index] * (inputs[index] * scale)


_compiled: list[Any] = []  # never freed: modules keep addresses


@lru_cache
def compiled() -> tuple[Parallel, int]:
    """`openmp`, and the address of the compiled function that does one thread's share of a `_Work`."""
    run = openmp()

    @cfunc(types.void(types.CPointer(types.int64)))
    def share(work):  # type: ignore[no-untyped-def]
        rows, width = work[3], work[4]
        thread, threads = thread_num(), num_threads()
        weight = carray(_floats(work[2]), (width,))
        eps = np.int64(work[5]).view(np.float64)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            inputs = carray(_floats(work[0] + 4 * row * width), (width,))
            outputs = carray(_floats(work[1] + 4 * row * width), (width,))
            _normalize(inputs, weight, eps, outputs)

    _compiled.append(share)
    return run, share.address
