"""Addresses in compiled functions: numbers at an address, and functions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from actors.engine.cpu_kernels.threads import barrier

_LLVM = {types.float32: ir.FloatType(), types.uint16: ir.IntType(16), types.int32: ir.IntType(32),
         types.int64: ir.IntType(64)}  # fmt: skip


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def pointer(context, address):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.inttoptr(args[0], _LLVM[kind].as_pointer())

        return types.CPointer(kind)(types.int64), generate

    return pointer


floats = _pointer_to(types.float32)
halves = _pointer_to(types.uint16)  # the bits of 16-bit numbers
int32s = _pointer_to(types.int32)
int64s = _pointer_to(types.int64)


@intrinsic
def call(context, address, work):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        work_type = ir.IntType(64).as_pointer()
        function = ir.FunctionType(ir.VoidType(), [work_type])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), [builder.inttoptr(args[1], work_type)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit(nogil=True)
def keep_alive(array):  # type: ignore[no-untyped-def]
    """Call this after the last use of an array's address: numba frees an array after its last use, and does not count
    uses of the address."""
    return len(array)


@njit(nogil=True)
def run_steps(program):  # type: ignore[no-untyped-def]
    """Call compiled functions one after the other on all threads: int64 number of steps, then for each step the address
    of a function of one pointer, and that pointer. No thread begins a step before all have ended the one before."""
    for step in range(program[0]):
        call(program[1 + 2 * step], program[2 + 2 * step])
        barrier()
