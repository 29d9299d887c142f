"""Finds weights that are steps of a grid in every block of 32 inputs, as checkpoints from GGUF files are.

Such a block is 32 codes of 4 or 8 bits, a step and an offset. A kernel computes exactly the original numbers from it,
in float32 or rounded to bfloat16: fewer bytes are read, and the result is the same. These are the blocks that ggml
calls Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor, nn

from actors.engine.cpu_kernels.numbers import rounded
from actors.engine.cpu_kernels.weight_formats import (
    BLOCK,
    CODE_BITS,
    CODES4,
    CODES4_ROUNDED,
    CODES8,
    CODES8_ROUNDED,
    PANEL,
    step_factors,
)
from actors.models.weight_products import codes_of_int4

_TRIED_ROWS = 16  # a weight without such blocks is known after so many of its rows
_NONE, _FOUR, _EIGHT = 0, 4, 8
_KINDS = {(torch.float32, _FOUR): CODES4, (torch.float32, _EIGHT): CODES8,
          (torch.bfloat16, _FOUR): CODES4_ROUNDED, (torch.bfloat16, _EIGHT): CODES8_ROUNDED}  # fmt: skip
_FACTORS = np.array(step_factors())

# Bits of the codes; the number farthest from the offset divided by the step; code of zero, or -1 where the least number
# has code 0.
_GRIDS = ((_FOUR, 15, -1), (_FOUR, -8, 8), (_EIGHT, 31, -1), (_EIGHT, -16, 16), (_EIGHT, 127, 128), (_EIGHT, -127, 128))
_LARGEST_HALF = 65504.0


class BlockWeights(NamedTuple):
    """weight = step * code + offset, rounded once to float32, and then to the weight's dtype; where they come from an
    `Int4Linear`, to within 2^-12 of a step."""

    kind: int  # see `weight_formats`
    codes: Tensor  # uint8 [out_features, in_features / 32, 32]
    steps: Tensor  # float32 [out_features, in_features / 32], as float16 has them
    offsets: Tensor  # the same

    @property
    def shape(self) -> tuple[int, int]:
        """out_features, in_features."""
        return len(self.codes), self.codes[0].numel()


def blocks_of_int4(weight: Tensor, scales_and_offsets: Tensor) -> BlockWeights:
    """Those of an `Int4Linear`. weight: [out_features, in_features / 2]; scales_and_offsets: [groups, out_features,
    2]."""
    scales, offsets = scales_and_offsets.float().transpose(0, 1).unbind(2)
    return BlockWeights(CODES4, codes_of_int4(weight), scales, offsets)


def find_blocks(weight: Tensor) -> BlockWeights | None:
    """weight: float32 or bfloat16 [out_features, in_features]. None where a block is no such grid."""
    weight = weight.detach()
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.shape[1] % BLOCK:
        return None
    blocks = _blocks_of(weight.float(), weight.dtype)
    if blocks is None and weight.dtype == torch.float32 and _is_bfloat16(weight[:_TRIED_ROWS]) and _is_bfloat16(weight):
        return _blocks_of(weight, torch.bfloat16)
    return blocks


def _blocks_of(weight: Tensor, dtype: torch.dtype) -> BlockWeights | None:
    """weight: float32. dtype: that it was rounded to."""
    shape = len(weight), weight.shape[1] // BLOCK
    codes = torch.empty((*shape, BLOCK), dtype=torch.uint8)
    steps, offsets = torch.empty(shape), torch.empty(shape)
    numbers = weight.contiguous().view(*codes.shape).numpy()
    bits = _fit(numbers, dtype == torch.bfloat16, codes.numpy(), steps.numpy(), offsets.numpy())
    return None if bits == _NONE else BlockWeights(_KINDS[dtype, bits], codes, steps, offsets)


def _is_bfloat16(weight: Tensor) -> bool:
    return torch.equal(weight.bfloat16().float(), weight)


def code_bits(weight: Tensor) -> int:
    """Bits of the codes that a weight can be stored in, judged by its first rows; 0 for none."""
    blocks = find_blocks(weight[:_TRIED_ROWS])
    return 0 if blocks is None else CODE_BITS[blocks.kind]


def grid_of(weight: Tensor, bits: int) -> Tensor:
    """The weight [out_features, in_features], rounded to blocks of codes of 4 or 8 bits."""
    blocks = weight.view(len(weight), -1, BLOCK)
    least, greatest = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
    if bits == _FOUR:
        steps, offsets = ((greatest - least) / 15).half().float(), least.half().float()
    else:
        steps = (torch.maximum(greatest, -least) / 127).half().float()
        offsets = -128 * steps
    codes = ((blocks - offsets) / steps).round_().clamp_(0, 2**bits - 1)
    return (codes * steps + offsets).view_as(weight)


@njit(cache=True, nogil=True)
def _fit(blocks, rounds, codes, steps, offsets):  # type: ignore[no-untyped-def]
    """Bits of the codes that all blocks have, 0 if one has none. blocks: float32 [rows, n, 32]. rounds: whether the
    numbers are bfloat16. Writes the codes, steps and offsets."""
    bits, grid = _FOUR, 0
    for row in range(blocks.shape[0]):
        for place in range(blocks.shape[1]):
            is_found, start = False, grid  # most blocks are of one kind
            for number in range(len(_GRIDS)):
                grid = (start + number) % len(_GRIDS)
                is_found, step, offset = _fit_block(blocks[row, place], rounds, codes[row, place], _GRIDS[grid])
                if is_found:
                    break
            if not is_found:
                return _NONE
            steps[row, place], offsets[row, place] = step, offset
            bits = max(bits, _GRIDS[grid][0])
    return bits


@njit(cache=True, nogil=True)
def _fit_block(block, rounds, codes, grid):  # type: ignore[no-untyped-def]
    """(whether the block is such a grid, step, offset)."""
    bits, last, zero = grid
    least, greatest = block.min(), block.max()
    if not (math.isfinite(least) and math.isfinite(greatest)):
        return False, np.float32(0.0), np.float32(0.0)
    if zero < 0:
        width, farthest = _half_spacing(least, rounds), _half_spacing(greatest, rounds)
        for offset in _halves(least - width, least + width):
            for step in _halves((greatest - farthest - offset) / last, (greatest + farthest - offset) / last):
                is_readable = _is_readable(step, offset)
                if is_readable and _fits(block, rounds, step, offset, 2**bits - 1, codes):
                    return True, np.float32(step), np.float32(offset)
    else:
        number = greatest if greatest > -least else least
        width = _half_spacing(number, rounds) / abs(last)
        for step in _halves(number / last - width, number / last + width):
            is_readable = _is_half(zero * step) and _is_readable(step, -zero * step)
            if is_readable and _fits(block, rounds, step, -zero * step, 2**bits - 1, codes):
                return True, np.float32(step), np.float32(-zero * step)
    return False, np.float32(0.0), np.float32(0.0)


@njit(cache=True, nogil=True)
def _fits(block, rounds, step, offset, largest, codes):  # type: ignore[no-untyped-def]
    inverse = 1.0 / step if step != 0.0 else 0.0
    for index in range(len(block)):
        code = min(max(np.rint((block[index] - offset) * inverse), 0.0), largest)
        number = np.float32(step * code + offset)  # the product is exact: the step has 11 bits
        if rounds:
            number = rounded(number)
        if number != block[index]:
            return False
        codes[index] = np.uint8(code)
    return True


@njit(cache=True, nogil=True)
def _is_readable(step, offset):  # type: ignore[no-untyped-def]
    """Whether all that `item_reader` may subtract from the offset leaves exact numbers."""
    for factor in _FACTORS:
        shifted = np.float64(offset) - np.float64(step) * factor
        if np.float64(np.float32(shifted)) != shifted:
            return False
    return True


@njit(nogil=True)  # not cached: numba cannot compile a caller of a generator that it has read from its cache
def _halves(low, high):  # type: ignore[no-untyped-def]
    """The numbers of float16 from low to high."""
    spacing = _spacing(min(abs(low), abs(high)), 11, -24)
    number = math.ceil(low / spacing)
    while number * spacing <= high:
        if _is_half(number * spacing):
            yield number * spacing
        number += 1


@njit(cache=True, nogil=True)
def _is_half(number):  # type: ignore[no-untyped-def]
    places = number / _spacing(number, 11, -24)
    return places == np.rint(places) and abs(number) <= _LARGEST_HALF


@njit(cache=True, nogil=True)
def _half_spacing(number, rounds):  # type: ignore[no-untyped-def]
    """Half the distance between numbers of bfloat16 or float32; 0 was not rounded."""
    if number == 0.0:
        return 0.0
    return _spacing(number, 8 if rounds else 24, -133) / 2


@njit(cache=True, nogil=True)
def _spacing(number, digits, least):  # type: ignore[no-untyped-def]
    """Distance of numbers of so many binary digits around this one, at least 2^least."""
    return math.ldexp(1.0, max(math.frexp(abs(number))[1] - digits, least))


def to_code_panels(weights: BlockWeights) -> Tensor:
    """int32 [panels, blocks of an output, words, PANEL]: for each block the steps and offsets of 16 outputs in float16,
    then their codes, the first in the lowest bits."""
    bits = CODE_BITS[weights.kind]
    codes = weights.codes.unflatten(2, (-1, 32 // bits))
    words = torch.zeros(codes.shape[:3], dtype=torch.int32)
    for place in range(codes.shape[3]):
        words |= codes[..., place].to(torch.int32) << bits * place
    numbers = torch.stack([weights.steps, weights.offsets], 2).half().view(torch.int16)
    halves, words = (_by_panels(part) for part in (numbers, words))
    return torch.cat([halves.flatten(2).view(torch.int32).unflatten(2, (1, PANEL)), words], 2)


def _by_panels(numbers: Tensor) -> Tensor:
    """[out_features, blocks, n] -> [panels, blocks, n, PANEL]"""
    padded = nn.functional.pad(numbers, (0, 0, 0, 0, 0, -len(numbers) % PANEL))
    return padded.unflatten(0, (-1, PANEL)).permute(0, 2, 3, 1).contiguous()
