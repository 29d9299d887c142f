"""Finds float32 weights that are steps of a grid in every block of 32 inputs, as checkpoints from GGUF files are.

Such a block is 32 codes of 4 or 8 bits, a step and an offset, from which a kernel makes the very float32 again: fewer
bytes to read, and the same result. These are the blocks that ggml calls Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from actors.engine.cpu_kernels.weight_formats import BLOCK, CODE_BITS, CODES4, CODES8, PANEL, step_factor

_TRIED_ROWS = 16  # a weight without such blocks is known after so many of its rows
_ROWS = 1024  # looked at in one go, which needs some times their memory


class BlockWeights(NamedTuple):
    """weight = step * code + offset, rounded once."""

    kind: int  # CODES4 or CODES8
    codes: Tensor  # uint8 [out_features, in_features / 32, 32]
    steps: Tensor  # float32 [out_features, in_features / 32], as float16 has them
    offsets: Tensor  # the same


class _Grid(NamedTuple):
    """How a block's numbers give its step and offset."""

    kind: int
    step: Callable[[Tensor, Tensor, Tensor], Tensor]  # of the least, the greatest and the farthest from zero
    zero: int | None  # code of zero; None: the least number has code 0


_GRIDS = (
    _Grid(CODES4, lambda least, greatest, farthest: (greatest - least) / 15, None),
    _Grid(CODES4, lambda least, greatest, farthest: farthest / -8, 8),
    _Grid(CODES8, lambda least, greatest, farthest: (greatest - least) / 31, None),
    _Grid(CODES8, lambda least, greatest, farthest: farthest / -16, 16),
    _Grid(CODES8, lambda least, greatest, farthest: farthest.abs() / 127, 128),
)


def find_blocks(weight: Tensor) -> BlockWeights | None:
    """weight: float32 [out_features, in_features]. None where a block is no such grid."""
    if weight.dtype != torch.float32 or weight.shape[1] % BLOCK:
        return None
    if _found(weight[:_TRIED_ROWS]) is None:
        return None
    parts = [_found(rows) for rows in weight.split(_ROWS)]
    if any(part is None for part in parts):
        return None
    kinds, *numbers = zip(*parts, strict=True)
    blocks = BlockWeights(max(kinds), *map(torch.cat, numbers))
    return blocks if _is_readable(blocks) else None


def code_bits(weight: Tensor) -> int:
    """Of the codes that a weight can be stored in, as its first rows have it; 0 for none."""
    blocks = find_blocks(weight[:_TRIED_ROWS])
    return 0 if blocks is None else CODE_BITS[blocks.kind]


def grid_of(weight: Tensor, bits: int) -> Tensor:
    """The weight [out_features, in_features], rounded to blocks of codes of 4 or 8 bits."""
    blocks = weight.view(len(weight), -1, BLOCK)
    least, greatest = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
    if bits == 4:
        steps, offsets = ((greatest - least) / 15).half().float(), least.half().float()
    else:
        steps = (torch.maximum(greatest, -least) / 127).half().float()
        offsets = -128 * steps
    codes = ((blocks - offsets) / steps).round_().clamp_(0, 2**bits - 1)
    return (codes * steps + offsets).view_as(weight)


def _found(weight: Tensor) -> BlockWeights | None:
    blocks = weight.view(len(weight), -1, BLOCK)
    least, greatest = blocks.amin(2), blocks.amax(2)
    farthest = torch.where(greatest > -least, greatest, least)
    steps, offsets = torch.zeros_like(least), least.clone()
    codes = torch.zeros_like(blocks, dtype=torch.uint8)
    is_open = least != greatest
    kind = CODES4
    for grid in _GRIDS:
        if not is_open.any():
            break
        step = grid.step(least[is_open], greatest[is_open], farthest[is_open]).half().float()
        offset = least[is_open] if grid.zero is None else -grid.zero * step
        top = 2 ** CODE_BITS[grid.kind] - 1
        tried = blocks[is_open]
        numbers = ((tried - offset[:, None]) / step[:, None]).round_().clamp_(0, top)
        # The step has 11 bits, so that the product is exact and the sum is rounded once.
        fits = (numbers * step[:, None] + offset[:, None] == tried).all(1) & (offset.half().float() == offset)
        if not fits.any():
            continue
        kind = max(kind, grid.kind)
        places = is_open.nonzero()[fits].unbind(1)
        steps[places], offsets[places], codes[places] = step[fits], offset[fits], numbers[fits].to(torch.uint8)
        is_open[places] = False
    return None if is_open.any() else BlockWeights(kind, codes, steps, offsets)


def _is_readable(blocks: BlockWeights) -> bool:
    """Whether float16 has the offsets, and what `item_reader` subtracts from them leaves exact numbers."""
    exact = blocks.offsets.double() - blocks.steps.double() * step_factor(blocks.kind)
    halves = blocks.offsets.half().float()  # constant blocks have any offset
    return torch.equal(halves, blocks.offsets) and torch.equal(exact.float().double(), exact)


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
