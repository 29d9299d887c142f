"""Formats of the weights in a panel, and how compiled code makes float32 of them, exactly.

A panel is a sequence of items: some inputs of its 16 outputs. Weights in bfloat16 lie in pairs of inputs, since a
vector of 32-bit words becomes two of float32 by a shift and a mask. Weights in blocks (see `block_weights`) are codes
of 4 or 8 bits in 32-bit words, with a step and an offset for 32 inputs: a code is moved into the mantissa of a float
between 1 and 2, which one multiply-add turns into the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

PANEL = 16  # outputs of a panel
BLOCK = 32  # inputs of a block


class Format(NamedTuple):
    item_bytes: int  # of one output
    inputs: int  # that an item is multiplied with
    input_bytes: int  # of all these inputs of a row


# In BFLOAT16_PAIRS the inputs are bfloat16, too; in all others they are float32.
FLOAT32, BFLOAT16, FLOAT16, INT8, BFLOAT16_PAIRS, CODES4, CODES8, CODES4_ROUNDED, CODES8_ROUNDED = range(9)
FORMATS = (
    Format(4, 1, 4),
    Format(4, 2, 8),
    Format(2, 1, 4),
    Format(1, 1, 4),
    Format(4, 2, 4),
    *(Format(4 + BLOCK // 2, BLOCK, 4 * BLOCK), Format(4 + BLOCK, BLOCK, 4 * BLOCK)) * 2,
)
CODE_BITS = {CODES4: 4, CODES8: 8, CODES4_ROUNDED: 4, CODES8_ROUNDED: 8}

INDEX, BYTE, INT = ir.IntType(64), ir.IntType(8), ir.IntType(32)
FLOAT = ir.FloatType()
VECTOR, INTS, HALVES = (ir.VectorType(kind, PANEL) for kind in (FLOAT, INT, ir.HalfType()))
_STORED = {FLOAT32: VECTOR, BFLOAT16: INTS, FLOAT16: HALVES,
           INT8: ir.VectorType(BYTE, PANEL), BFLOAT16_PAIRS: INTS}  # fmt: skip

# Where codes are read in a word: (shift of the word, to the left if positive; lowest bit), in the order of inputs.
_PLACES = {
    4: ((12, 12), (12, 16), (8, 16), (0, 12), (0, 16), (-4, 16), (-12, 12), (-12, 16)),
    8: ((15, 15), (7, 15), (-1, 15), (-9, 15)),
}
_ONE, _MANTISSA_BITS = 0x3F800000, 23


def step_factors() -> list[float]:
    """The factors of a step that are subtracted from its offset, in any format."""
    places = {place for of_bits in _PLACES.values() for _, place in of_bits}
    return [float(2 ** (_MANTISSA_BITS - place)) for place in sorted(places)]


def item_reader(builder: ir.IRBuilder, kind: int, item: ir.Value) -> Callable[[int], ir.Value]:
    """item: address of an item. Gives the vector of float32 weights for an input of the item, by its number; of
    BFLOAT16_PAIRS, the pairs as they are."""
    if kind in CODE_BITS:
        return _code_reader(builder, CODE_BITS[kind], kind in (CODES4_ROUNDED, CODES8_ROUNDED), item)
    stored = builder.load(builder.inttoptr(item, _STORED[kind].as_pointer()), align=FORMATS[kind].item_bytes)
    if kind == BFLOAT16:
        first = builder.shl(stored, ir.Constant(INTS, [16] * PANEL))
        second = builder.and_(stored, ir.Constant(INTS, [0xFFFF0000] * PANEL))
        return [builder.bitcast(first, VECTOR), builder.bitcast(second, VECTOR)].__getitem__
    if kind == FLOAT16:
        stored = builder.fpext(stored, VECTOR)
    if kind == INT8:
        stored = builder.sitofp(builder.sext(stored, INTS), VECTOR)
    return [stored].__getitem__


def _code_reader(builder: ir.IRBuilder, bits: int, rounds: bool, item: ir.Value) -> Callable[[int], ir.Value]:
    """weight = step * code + offset. A code c with its lowest bit at p is 1 + c * 2^(p-23) as a float, and the step and
    offset of that are step * 2^(23-p) and offset - step * 2^(23-p)."""
    halves = builder.inttoptr(item, HALVES.as_pointer())
    step, offset = (
        builder.fpext(builder.load(builder.gep(halves, [INDEX(place)]), align=2), VECTOR) for place in (0, 1)
    )
    scaled = {}
    for place in sorted({place for _, place in _PLACES[bits]}):
        large = builder.fmul(step, ir.Constant(VECTOR, [float(1 << (_MANTISSA_BITS - place))] * PANEL))
        scaled[place] = large, builder.fsub(offset, large)
    words = builder.bitcast(builder.gep(halves, [INDEX(2)]), INTS.as_pointer())
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), f"llvm.fma.v{PANEL}f32"
    )
    codes = len(_PLACES[bits])  # of a word
    loaded: dict[int, ir.Value] = {}

    def weights(number: int) -> ir.Value:
        word, (shift, place) = number // codes, _PLACES[bits][number % codes]
        if word not in loaded:
            loaded[word] = builder.load(builder.gep(words, [INDEX(word)]), align=4)
        value = loaded[word]
        if shift:
            move = builder.shl if shift > 0 else builder.lshr
            value = move(value, ir.Constant(INTS, [abs(shift)] * PANEL))
        value = builder.and_(value, ir.Constant(INTS, [((1 << bits) - 1) << place] * PANEL))
        value = builder.or_(value, ir.Constant(INTS, [_ONE] * PANEL))
        number = builder.call(multiply_add, [builder.bitcast(value, VECTOR), *scaled[place]])
        if rounds:  # to bfloat16, by Veltkamp's splitting
            large = builder.fmul(number, ir.Constant(VECTOR, [float(2**16 + 1)] * PANEL))
            number = builder.fadd(large, builder.fsub(number, large))
        return number

    return weights
