"""The Triton kernel of RMS norms: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    inputs,  # [rows, width]
    weight,  # [width]
    outputs,  # [rows, width], written
    eps,
    width: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two
):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(inputs + row + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    quotient = (values * scale).to(outputs.dtype.element_ty).to(tl.float32)  # rounded, as in the models
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(outputs + row + columns, (quotient * factors).to(outputs.dtype.element_ty), mask=inside)


def launch(inputs: torch.Tensor, weight: torch.Tensor, outputs: torch.Tensor, eps: float) -> None:
    """inputs, outputs: contiguous [..., width]."""
    width = len(weight)
    with torch.cuda.device_of(inputs):
        rms_norm_kernel[(inputs.numel() // width,)](
            inputs, weight, outputs, eps, width, BLOCK=triton.next_power_of_2(width), num_warps=8
        )
