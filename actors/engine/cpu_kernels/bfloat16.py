"""bfloat16 in compiled functions, which know no such type."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LANES = 16


@njit(nogil=True)
def widened(bits: np.uint16) -> np.float32:
    """A bfloat16."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit(nogil=True)
def narrowed(number: np.float32) -> np.uint16:
    """The nearest bfloat16; of two, the even one. NaN may become infinite."""
    bits = np.float32(number).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(nogil=True)
def rounded(number: np.float32) -> np.float32:
    """`narrowed`, as a float32."""
    bits = np.float32(number).view(np.uint32)
    bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint32(bits & np.uint32(0xFFFF0000)).view(np.float32)


def _copies_lanes(is_half: bool):  # type: ignore[no-untyped-def]
    stored = ir.VectorType(ir.IntType(16) if is_half else ir.FloatType(), LANES)
    bits, numbers = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)

    @intrinsic
    def copy_lanes(context, source, destination):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            value = builder.load(builder.inttoptr(args[0], stored.as_pointer()), align=2)
            if is_half:
                shifted = builder.shl(builder.zext(value, bits), ir.Constant(bits, [16] * LANES))
                value = builder.bitcast(shifted, numbers)
            builder.store(value, builder.inttoptr(args[1], numbers.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return copy_lanes


# Copy 16 numbers from one address to another, of float32: from float32, and from bfloat16
copy_lanes, widen_lanes = _copies_lanes(False), _copies_lanes(True)
