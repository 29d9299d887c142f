"""Products with weights in int8 or int4 on a GPU, as one operator that torch's compiler does not look into.

Few rows are multiplied by a Triton kernel that reads the weights as they are stored. torch's int8 kernel for CUDA uses
one thread per output and no tensor cores; its int4 kernel needs a layout that cannot be dequantized for the many rows
of a prompt.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

GROUP = 32  # weights that share an int4 scale
_LEAST_CAPABILITY = (8, 0)  # as for attention by Triton
_MOST_KERNEL_ROWS = 256  # with more, widening the weights costs less than the product


def has_weight_kernel(device: torch.device) -> bool:
    """Whether `weight_product` has its kernel on a device."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


def weight_product(inputs: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """[rows, in_features] -> [rows, out_features], in the dtype of the inputs.

    weight and scales: of an `Int8Linear`, or the scales with offsets of an `Int4Linear`.
    """
    output: Tensor = torch.ops.paceline.weight_product(inputs, weight, scales)
    return output


def widened_int8(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """weight: int8 [out_features, in_features]; scales: float32 [out_features]."""
    return (weight * scales[:, None]).to(dtype)


def codes_of_int4(weight: Tensor) -> Tensor:
    """uint8 [out_features, in_features // 2], the first of two codes in the high bits -> [out_features, groups, 32]."""
    return torch.stack([weight >> 4, weight & 15], dim=2).view(len(weight), -1, GROUP)


def widened_int4(weight: Tensor, scales_and_offsets: Tensor) -> Tensor:
    """float32 [out_features, in_features]. weight: see `codes_of_int4`; scales_and_offsets: of any floating dtype,
    [groups, out_features, 2]."""
    scales, offsets = scales_and_offsets.float().transpose(0, 1).split(1, dim=2)
    return (codes_of_int4(weight) * scales + offsets).view(len(weight), -1)


def _weight_product(inputs: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    is_int4 = weight.dtype == torch.uint8
    if len(inputs) <= _MOST_KERNEL_ROWS:
        from actors.models.weight_kernels import launch_product  # Triton is not installed everywhere

        return launch_product(inputs, weight, scales, GROUP if is_int4 else 0)
    if is_int4:  # whose kernel rounds scales and offsets to the inputs' dtype, too: the same weights for any rows
        wide = widened_int4(weight, scales.to(inputs.dtype)).to(inputs.dtype)
    else:
        wide = widened_int8(weight, scales, inputs.dtype)
    return torch.nn.functional.linear(inputs, wide)


def _fake_weight_product(inputs: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return inputs.new_empty((inputs.shape[0], weight.shape[0]))


_library = torch.library.Library("paceline", "FRAGMENT")
_library.define("weight_product(Tensor inputs, Tensor weight, Tensor scales) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("weight_product", _weight_product, _device)
torch.library.register_fake("paceline::weight_product", _fake_weight_product, lib=_library)
