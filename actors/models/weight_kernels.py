"""Triton kernels of products with weights in int8 or int4, which are widened in registers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_SMALLEST_BLOCK, _MOST_TILE_ROWS = 16, 64
_MANY_OUTPUTS = 1 << 14
_LARGE_MEMORY = 160 << 10  # bytes of shared memory that a program may have on Ampere's and Hopper's largest
_MOST_STAGES = 3  # on others, which have 99 KiB


class _Tile(NamedTuple):
    outputs: int
    inputs: int
    warps: int
    stages: int


# The fastest of a sweep on an H200, bfloat16, weights not in a cache; microseconds for 4096 -> 4096, 4096 -> 28672 and
# 14336 -> 4096. cuBLAS with weights in bfloat16 takes 13, 58 and 36 for 16 rows and 13, 63 and 37 for 64. Those of int4
# were measured before its scales came as words.
_FEW_OUTPUTS_TILE = _Tile(32, 256, 4, 4)  # int8: 10, 36, 26; 64 rows 17, 106, 50. int4: 22, 81, 72; 64 rows 27, 177, 88
_INT8_MANY_ROWS_TILE = _Tile(128, 64, 8, 4)  # 64 rows: 37, 59, 123
_INT4_MANY_OUTPUTS_TILE = _Tile(64, 128, 4, 4)  # 34, 67, 110; 64 rows: 49, 111, 164
_FLOAT32_TILE = _Tile(32, 32, 4, 2)  # not measured: it fits everywhere


@triton.jit(do_not_specialize=["num_rows"])
def int8_kernel(
    inputs,  # [rows, num_inputs]
    weight,  # int8 [num_outputs, num_inputs]
    scales,  # float32 [num_outputs]
    output,  # [rows, num_outputs]
    num_rows,
    num_inputs,
    num_outputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # num_inputs is a multiple of BLOCK_K
    UPCAST: tl.constexpr,
):
    """Grid (tile of outputs, tile of rows)."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_output, is_row = outputs < num_outputs, rows < num_rows
    own_inputs = inputs + rows.to(tl.int64)[:, None] * num_inputs
    own_weight = weight + outputs.to(tl.int64)[None, :] * num_inputs
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        places = first + tl.arange(0, BLOCK_K)
        is_given, is_code = is_row[:, None], is_output[None, :]
        if not EVEN_K:
            is_given &= places[None, :] < num_inputs
            is_code &= places[:, None] < num_inputs
        given = tl.load(own_inputs + places[None, :], mask=is_given, other=0.0)
        codes = tl.load(own_weight + places[:, None], mask=is_code, other=0)
        if UPCAST:
            given = given.to(tl.float32)
        acc = tl.dot(given, codes.to(given.dtype), acc, input_precision="ieee")
    acc = acc * tl.load(scales + outputs, mask=is_output, other=0.0)[None, :]
    tl.store(
        output + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :],
        acc.to(output.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


@triton.jit
def _widened_codes(codes, dtype: tl.constexpr):
    """0 to 15, as the last bits of a number in whose binade the spacing is 1: fewer instructions than a conversion."""
    if dtype == tl.bfloat16:
        return (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 128.0
    elif dtype == tl.float16:
        return (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    else:
        return codes.to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def int4_kernel(
    inputs,  # [rows, num_inputs]
    weight,  # uint8 [num_outputs, num_inputs // 2], the first of two codes in the high bits
    scales,  # int32 [num_inputs // GROUP, num_outputs]: float16 scale, and offset in the high bits
    output,  # [rows, num_outputs]
    num_rows,
    num_inputs,
    num_outputs,
    GROUP: tl.constexpr,  # inputs that share a scale; num_inputs and BLOCK_K are multiples of it
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (tile of outputs, tile of rows).

    Scale and offset are loaded as one word, because loads of less than 4 bytes cannot be copied ahead to shared memory:
    every step of the loop would wait for them.
    """
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    PAIRS: tl.constexpr = BLOCK_K // 2
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_output, is_row = outputs < num_outputs, rows < num_rows
    own_inputs = inputs + rows.to(tl.int64)[:, None] * num_inputs
    own_weight = weight + outputs.to(tl.int64)[None, :] * (num_inputs // 2)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        places = first + tl.arange(0, BLOCK_K)
        pairs = first // 2 + tl.arange(0, PAIRS)
        groups = first // GROUP + tl.arange(0, GROUPS)
        is_given, is_code, is_scale = is_row[:, None], is_output[None, :], is_output[None, :]
        if not EVEN_K:
            is_given &= places[None, :] < num_inputs
            is_code &= pairs[:, None] < num_inputs // 2
            is_scale &= groups[:, None] < num_inputs // GROUP
        given = tl.load(own_inputs + places[None, :], mask=is_given, other=0.0)
        codes = tl.load(own_weight + pairs[:, None], mask=is_code, other=0)
        words = tl.load(scales + groups[:, None] * num_outputs + outputs[None, :], mask=is_scale, other=0)
        if UPCAST:
            given = given.to(tl.float32)
        even, odd = tl.split(tl.reshape(given, [BLOCK_M, PAIRS, 2]))
        scale = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(given.dtype)
        offset = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(given.dtype)
        scale = tl.reshape(tl.broadcast_to(scale[:, None, :], [GROUPS, GROUP // 2, BLOCK_N]), [PAIRS, BLOCK_N])
        offset = tl.reshape(tl.broadcast_to(offset[:, None, :], [GROUPS, GROUP // 2, BLOCK_N]), [PAIRS, BLOCK_N])
        # Rounded once, as code * scale alone may exceed float16.
        high = tl.fma(_widened_codes(codes >> 4, given.dtype), scale, offset)
        low = tl.fma(_widened_codes(codes & 15, given.dtype), scale, offset)
        acc = tl.dot(even, high, acc, input_precision="ieee")
        acc = tl.dot(odd, low, acc, input_precision="ieee")
    tl.store(
        output + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :],
        acc.to(output.dtype.element_ty),
        mask=is_row[:, None] & is_output[None, :],
    )


def product_constants(
    rows: int, in_features: int, out_features: int, group: int, dtype: torch.dtype
) -> dict[str, int | bool]:
    """What a kernel is compiled for, without its stages. group: 0 for int8.

    It depends on shapes and dtype alone, so that rows in tiles of one size have the same bits in any call.
    """
    block_rows = _block_rows(rows)
    tile = _tile(block_rows, out_features, group, dtype)
    return ({"GROUP": group} if group else {}) | {
        "BLOCK_M": block_rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": tile.inputs,
        "EVEN_K": in_features % tile.inputs == 0,
        # The interpreter keeps bfloat16 as bits and computes with those.
        "UPCAST": triton.knobs.runtime.interpret and dtype == torch.bfloat16,
    }


def launch_options(rows: int, out_features: int, group: int, dtype: torch.dtype, shared_memory: int) -> dict[str, int]:
    """shared_memory: bytes that a program may have. The number of stages changes no result."""
    tile = _tile(_block_rows(rows), out_features, group, dtype)
    has_large_memory = shared_memory >= _LARGE_MEMORY
    return {
        "num_warps": tile.warps,
        "num_stages": tile.stages if has_large_memory else min(tile.stages, _MOST_STAGES),
    }


def _block_rows(rows: int) -> int:
    return min(_MOST_TILE_ROWS, max(_SMALLEST_BLOCK, triton.next_power_of_2(rows)))


def _tile(block_rows: int, out_features: int, group: int, dtype: torch.dtype) -> _Tile:
    if dtype == torch.float32:
        return _FLOAT32_TILE
    if out_features < _MANY_OUTPUTS:
        return _FEW_OUTPUTS_TILE
    if group:
        return _INT4_MANY_OUTPUTS_TILE
    return _INT8_MANY_ROWS_TILE if block_rows == _MOST_TILE_ROWS else _FEW_OUTPUTS_TILE


def launch_product(inputs: Tensor, weight: Tensor, scales: Tensor, group: int) -> Tensor:
    """[rows, in_features] -> [rows, out_features], in the dtype of the inputs.

    weight and scales: of an `Int8Linear` (group: 0), or the scales with offsets of an `Int4Linear`.
    """
    num_rows, in_features = inputs.shape
    out_features = len(weight)
    output = inputs.new_empty((num_rows, out_features))
    constants = product_constants(num_rows, in_features, out_features, group, inputs.dtype)
    options = launch_options(num_rows, out_features, group, inputs.dtype, _shared_memory(inputs.device))
    kernel: Any = int4_kernel if group else int8_kernel
    numbers = scales.view(torch.int32) if group else scales
    grid = (triton.cdiv(out_features, constants["BLOCK_N"]), triton.cdiv(num_rows, constants["BLOCK_M"]))
    with torch.cuda.device_of(inputs):
        kernel[grid](
            inputs.contiguous(), weight, numbers, output, num_rows, in_features, out_features, **constants, **options
        )
    return output


@lru_cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; none for the interpreter, which needs none."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
