"""Triton kernel of products with weights in int8 or int4, which are widened in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SMALLEST_BLOCK, _MOST_TILE_ROWS = 16, 64
_TILE_OUTPUTS, _TILE_INPUTS = 32, 128


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    inputs,  # [rows, IN]
    weight,  # int8 [OUT, IN]; int4: uint8 [OUT, IN // 2], the first of two codes in the high bits
    scales,  # float32 [OUT]; int4: float16 [IN // GROUP, OUT, scale and offset]
    output,  # [rows, OUT]
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share an int4 scale; int8: 0
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (tile of outputs, tile of rows)."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_output, is_row = outputs < OUT, rows < num_rows
    own_inputs = inputs + rows.to(tl.int64)[:, None] * IN
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, IN, BLOCK_K):
        if GROUP > 0:
            pairs = first // 2 + tl.arange(0, BLOCK_K // 2)
            is_pair = pairs < IN // 2
            is_code = is_pair[:, None] & is_output[None, :]
            codes = tl.load(weight + outputs.to(tl.int64)[None, :] * (IN // 2) + pairs[:, None], mask=is_code, other=0)
            places = scales + 2 * ((pairs // (GROUP // 2))[:, None] * OUT + outputs[None, :])
            scale = tl.load(places, mask=is_code, other=0.0).to(tl.float32)
            offset = tl.load(places + 1, mask=is_code, other=0.0).to(tl.float32)
            is_input = is_row[:, None] & is_pair[None, :]
            even = tl.load(own_inputs + 2 * pairs[None, :], mask=is_input, other=0.0)
            odd = tl.load(own_inputs + 2 * pairs[None, :] + 1, mask=is_input, other=0.0)
            high = ((codes >> 4).to(tl.float32) * scale + offset).to(even.dtype)
            low = ((codes & 15).to(tl.float32) * scale + offset).to(even.dtype)
            if UPCAST:
                even, odd = even.to(tl.float32), odd.to(tl.float32)
                high, low = high.to(tl.float32), low.to(tl.float32)
            acc = tl.dot(even, high, acc, input_precision="ieee")
            acc = tl.dot(odd, low, acc, input_precision="ieee")
        else:
            places = first + tl.arange(0, BLOCK_K)
            is_place = places < IN
            given = tl.load(own_inputs + places[None, :], mask=is_row[:, None] & is_place[None, :], other=0.0)
            codes = tl.load(
                weight + outputs.to(tl.int64)[None, :] * IN + places[:, None],
                mask=is_place[:, None] & is_output[None, :],
                other=0,
            )
            if UPCAST:
                given = given.to(tl.float32)
            acc = tl.dot(given, codes.to(given.dtype), acc, input_precision="ieee")
    if GROUP == 0:
        acc = acc * tl.load(scales + outputs, mask=is_output, other=0.0)[None, :]
    tl.store(
        output + rows.to(tl.int64)[:, None] * OUT + outputs[None, :],
        acc.to(output.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


def product_constants(
    rows: int, in_features: int, out_features: int, group: int, dtype: torch.dtype
) -> dict[str, int | bool]:
    """What `product_kernel` is compiled for. group: 0 for int8."""
    return {
        "IN": in_features,
        "OUT": out_features,
        "GROUP": group,
        "BLOCK_M": min(_MOST_TILE_ROWS, max(_SMALLEST_BLOCK, triton.next_power_of_2(rows))),
        "BLOCK_N": _TILE_OUTPUTS,
        "BLOCK_K": _TILE_INPUTS,
        # The interpreter keeps bfloat16 as bits and multiplies those.
        "UPCAST": triton.knobs.runtime.interpret and dtype == torch.bfloat16,
    }


def launch_product(inputs: Tensor, weight: Tensor, scales: Tensor, group: int) -> Tensor:
    """[rows, in_features] -> [rows, out_features], in the dtype of the inputs. group: 0 for int8."""
    num_rows, in_features = inputs.shape
    out_features = len(weight)
    output = inputs.new_empty((num_rows, out_features))
    constants = product_constants(num_rows, in_features, out_features, group, inputs.dtype)
    grid = (triton.cdiv(out_features, constants["BLOCK_N"]), triton.cdiv(num_rows, constants["BLOCK_M"]))
    with torch.cuda.device_of(inputs):
        product_kernel[grid](
            inputs.contiguous(), weight, scales, output, num_rows, **constants, num_warps=4, num_stages=3
        )
    return output
