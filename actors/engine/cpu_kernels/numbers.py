"""Numbers in compiled functions: bfloat16, which numba does not know, and 16 numbers at once."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from actors.sampling.exponential import COEFFICIENTS, LEAST_EXPONENT, LN2_HIGH, LN2_LOW, LOG2_E

LANES = 16


@njit(nogil=True)
def widened(bits: np.uint16) -> np.float32:
    """A bfloat16."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit(nogil=True)
def narrowed(number: np.float32) -> np.uint16:
    """The nearest bfloat16; of two, the even one. NaN may become another number."""
    bits = np.float32(number).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(nogil=True)
def rounded(number: np.float32) -> np.float32:
    """`narrowed`, as a float32."""
    bits = np.float32(number).view(np.uint32)
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32(bits & np.uint32(0xFFFF0000)).view(np.float32)


_BITS, _NUMBERS = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)


def _loaded(builder: ir.IRBuilder, address: ir.Value, is_half: bool) -> ir.Value:
    """16 numbers at an address, as float32."""
    if not is_half:
        return builder.load(builder.inttoptr(address, _NUMBERS.as_pointer()), align=4)
    bits = builder.zext(builder.load(builder.inttoptr(address, _HALVES.as_pointer()), align=2), _BITS)
    return builder.bitcast(builder.shl(bits, ir.Constant(_BITS, [16] * LANES)), _NUMBERS)


def _stored(builder: ir.IRBuilder, numbers: ir.Value, address: ir.Value) -> None:
    builder.store(numbers, builder.inttoptr(address, _NUMBERS.as_pointer()), align=4)


def _copies_lanes(is_half: bool):  # type: ignore[no-untyped-def]
    @intrinsic
    def copy(context, source, destination):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            _stored(builder, _loaded(builder, args[0], is_half), args[1])
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return copy


def _turns_lanes(is_half: bool):  # type: ignore[no-untyped-def]
    @intrinsic
    def turn(context, offsets, source, destination):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            int64 = ir.IntType(64)
            first = builder.inttoptr(args[0], int64.as_pointer())
            rows = [
                _loaded(builder, builder.add(args[1], builder.load(builder.gep(first, [int64(row)]))), is_half)
                for row in range(LANES)
            ]
            for step in (8, 4, 2, 1):  # squares of that side change places with those on the other side of the diagonal
                low = [lane if lane & step == 0 else LANES + lane - step for lane in range(LANES)]
                high = [lane + step if lane & step == 0 else LANES + lane for lane in range(LANES)]
                for row in range(LANES):
                    if row & step == 0:
                        pair = rows[row], rows[row + step]
                        rows[row], rows[row + step] = (
                            builder.shuffle_vector(*pair, ir.Constant(_BITS, places)) for places in (low, high)
                        )
            for row, numbers in enumerate(rows):
                _stored(builder, numbers, builder.add(args[2], int64(4 * LANES * row)))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return turn


# copy(source, destination): 16 numbers at an address become float32 at another. turn(offsets, source, destination): 16
# rows of 16 numbers, at 16 int64 offsets from a source, become columns, float32 [16, 16].
copy_lanes, widen_lanes = _copies_lanes(False), _copies_lanes(True)
turn_floats, turn_halves = _turns_lanes(False), _turns_lanes(True)


def _reduced(builder: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    kinds = [arg.type for arg in args]
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.FloatType(), kinds), name)
    return builder.call(function, args, fastmath=("reassoc", "nnan", "nsz"))


def _all_lanes(builder: ir.IRBuilder, number: ir.Value) -> ir.Value:
    lane = builder.insert_element(ir.Constant(_NUMBERS, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(lane, lane, ir.Constant(_BITS, [0] * LANES))


def _larger(builder: ir.IRBuilder, one: ir.Value, other: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def _exponentials(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    """As `sampling.exponential`, for numbers up to 0."""

    def constant(number: float) -> ir.Value:
        return ir.Constant(_NUMBERS, [float(np.float32(number))] * LANES)

    def multiply_add(one: ir.Value, other: ir.Value, third: ir.Value) -> ir.Value:
        kind = ir.FunctionType(_NUMBERS, [_NUMBERS] * 3)
        return builder.call(
            cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32"), [one, other, third]
        )

    floor = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_NUMBERS, [_NUMBERS]), f"llvm.floor.v{LANES}f32"
    )
    numbers = _larger(builder, numbers, constant(LEAST_EXPONENT))
    power = builder.call(floor, [multiply_add(numbers, constant(LOG2_E), constant(0.5))])
    rest = multiply_add(power, constant(-LN2_HIGH), numbers)
    rest = multiply_add(power, constant(-LN2_LOW), rest)
    value = constant(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        value = multiply_add(value, rest, constant(coefficient))
    value = builder.fadd(multiply_add(value, builder.fmul(rest, rest), rest), constant(1.0))
    exponent = builder.add(builder.fptosi(power, _BITS), ir.Constant(_BITS, [127] * LANES))
    return builder.fmul(value, builder.bitcast(builder.shl(exponent, ir.Constant(_BITS, [23] * LANES)), _NUMBERS))


@intrinsic(prefer_literal=True)
def largest(context, address, count, least):  # type: ignore[no-untyped-def]
    """The largest of `least` and `count` float32 at an address, a literal multiple of 16."""
    vectors = count.literal_value // LANES

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        top = _all_lanes(builder, args[2])
        for index in range(vectors):
            place = builder.add(args[0], ir.IntType(64)(4 * LANES * index))
            top = _larger(builder, _loaded(builder, place, False), top)
        return _reduced(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", top)

    return types.float32(types.int64, count, types.float32), generate


@intrinsic(prefer_literal=True)
def weigh(context, address, count, top, hidden):  # type: ignore[no-untyped-def]
    """Replace `count` scores at an address, a literal multiple of 16, by exp(score - top), and by 0 unless they exceed
    `hidden`; their sum."""
    vectors = count.literal_value // LANES

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        top, hidden = _all_lanes(builder, args[2]), _all_lanes(builder, args[3])
        total = ir.Constant(_NUMBERS, [0.0] * LANES)
        for index in range(vectors):
            place = builder.add(args[0], ir.IntType(64)(4 * LANES * index))
            scores = _loaded(builder, place, False)
            weights = _exponentials(builder, builder.fsub(scores, top))
            weights = builder.select(
                builder.fcmp_ordered(">", scores, hidden), weights, ir.Constant(_NUMBERS, [0.0] * LANES)
            )
            _stored(builder, weights, place)
            total = builder.fadd(total, weights)
        return _reduced(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", ir.FloatType()(0.0), total)

    return types.float32(types.int64, count, types.float32, types.float32), generate
