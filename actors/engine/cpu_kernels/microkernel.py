"""Products of a few rows with a weight matrix on CPU, near the speed at which the weights can be read.

Weights are stored in panels of 16 outputs, [panels, in_features, 16], so that each vector of a panel is loaded once and
multiplied with an element of every row: the register blocking of Goto and van de Geijn, "Anatomy of High-Performance
Matrix Multiplication", 2008. Libraries choose their blocks for hundreds of rows; a round has a few. The loop over
in_features is LLVM IR without a word about the instruction set: LLVM takes SSE, AVX2, AVX-512 or NEON as there is.

An output is the sum over in_features in ascending order, by one accumulator, whatever the number of rows. So a row's
bits depend neither on the other rows nor on its place among them.

Weights in bfloat16 lie in pairs of inputs: a vector of 32-bit words becomes two of float32 by a shift and a mask.
Processors with AVX512-BF16 can also multiply such pairs with pairs of bfloat16 inputs; some are slower at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from actors.engine.cpu_kernels.entry_points import SOURCES, entry_point

PANEL = 16  # outputs of a panel
_DEPTH = 1024  # in_features between two stores of the sums: a panel's share stays in the second-level cache

# Formats of stored weights, and bytes of their items and of the inputs that an item is multiplied with. In BFLOAT16 an
# item is two weights, for two inputs in float32; in BFLOAT16_PAIRS the two inputs are bfloat16, too.
FLOAT32, BFLOAT16, FLOAT16, INT8, BFLOAT16_PAIRS = range(5)
ITEM_BYTES = (4, 4, 2, 1, 4)
INPUTS_OF_ITEM = (1, 2, 1, 1, 2)
INPUT_BYTES = (4, 8, 4, 4, 4)
# Distance of prefetched weights. Some processors need 4 to 25 % fewer seconds with it, others 10 to 20 % more.
AHEAD_BYTES = 2048

_INDEX = ir.IntType(64)
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, PANEL)
_BYTE, _INT = ir.IntType(8), ir.IntType(32)
_INTS = ir.VectorType(_INT, PANEL)
_STORED = (_FLOAT, _INT, ir.HalfType(), ir.IntType(8), _INT)


class _BFloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * PANEL)


def _widened(builder: ir.IRBuilder, weights: ir.Value, kind: int) -> list[ir.Value]:
    """Vectors of float32, one for each input of an item; exact. Pairs stay as they are."""
    if kind == BFLOAT16:
        first = builder.shl(weights, ir.Constant(_INTS, [16] * PANEL))
        second = builder.and_(weights, ir.Constant(_INTS, [0xFFFF0000] * PANEL))
        return [builder.bitcast(first, _VECTOR), builder.bitcast(second, _VECTOR)]
    if kind == FLOAT16:
        return [builder.fpext(weights, _VECTOR)]
    if kind == INT8:
        return [builder.sitofp(builder.sext(weights, _INTS), _VECTOR)]
    return [weights]


def _multiply_add(builder: ir.IRBuilder, kind: int) -> Callable[[ir.Value, ir.Value, ir.Value], ir.Value]:
    """weights, an input in all places, sums -> the sums with the products."""
    if kind == BFLOAT16_PAIRS:
        add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_VECTOR, [_VECTOR, _PAIRS, _PAIRS]), "llvm.x86.avx512bf16.dpbf16ps.512"
        )
        return lambda weights, inputs, sums: builder.call(
            add, [sums, builder.bitcast(weights, _PAIRS), builder.bitcast(inputs, _PAIRS)]
        )
    add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{PANEL}f32"
    )
    return lambda weights, inputs, sums: builder.call(add, [weights, inputs, sums])


@intrinsic(prefer_literal=True)
def _block(context, place, rows, panels, kind, ahead_bytes):  # type: ignore[no-untyped-def]
    """outputs[r, 16 p + i] += sum over d of inputs[r, d] * weights[p, d, i], for literals after `place`.

    place: inputs, in_stride, weights, panel_bytes, depth, outputs, out_stride: addresses, strides in elements, and the
    number of items.
    """
    num_rows, num_panels, stored = rows.literal_value, panels.literal_value, kind.literal_value
    signature = types.void(types.UniTuple(types.intp, 7), rows, panels, kind, ahead_bytes)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        inputs, in_stride, weights, panel_bytes, depth, outputs, out_stride = cgutils.unpack_tuple(builder, args[0])
        add = _multiply_add(builder, stored)
        prefetch = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), *[_INT] * 3]),
            "llvm.prefetch.p0i8",
        )
        panel_type = ir.VectorType(_STORED[stored], PANEL).as_pointer()
        input_type = _INT if stored == BFLOAT16_PAIRS else _FLOAT
        inputs_type = ir.VectorType(input_type, PANEL)
        first_input = builder.inttoptr(inputs, input_type.as_pointer())
        first_output = builder.inttoptr(outputs, _FLOAT.as_pointer())
        row_inputs = [builder.gep(first_input, [builder.mul(in_stride, _INDEX(row))]) for row in range(num_rows)]
        panel_weights = [
            builder.inttoptr(builder.add(weights, builder.mul(panel_bytes, _INDEX(panel))), panel_type)
            for panel in range(num_panels)
        ]
        places = {
            (row, panel): builder.bitcast(
                builder.gep(first_output, [builder.add(builder.mul(out_stride, _INDEX(row)), _INDEX(panel * PANEL))]),
                _VECTOR.as_pointer(),
            )
            for row in range(num_rows)
            for panel in range(num_panels)
        }
        before = {place: builder.load(pointer, align=4) for place, pointer in places.items()}
        entry = builder.block
        loop, end = builder.append_basic_block("depths"), builder.append_basic_block("stored")
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(_INDEX)
        index.add_incoming(_INDEX(0), entry)
        sums = {place: builder.phi(_VECTOR) for place in places}
        for place, value in sums.items():
            value.add_incoming(before[place], entry)
        for pointer in panel_weights if ahead_bytes.literal_value else ():
            ahead = builder.add(index, _INDEX(ahead_bytes.literal_value // (PANEL * ITEM_BYTES[stored])))
            line = builder.bitcast(builder.gep(pointer, [ahead]), _BYTE.as_pointer())
            builder.call(prefetch, [line, _INT(0), _INT(3), _INT(1)])  # to be read, kept in all caches, data
        loaded = [
            _widened(builder, builder.load(builder.gep(pointer, [index]), align=ITEM_BYTES[stored]), stored)
            for pointer in panel_weights
        ]
        added = dict(sums)
        inputs_of_item = len(loaded[0])
        first_of_item = builder.mul(index, _INDEX(inputs_of_item))
        for row, pointer in enumerate(row_inputs):
            for number in range(inputs_of_item):
                element = builder.load(builder.gep(pointer, [builder.add(first_of_item, _INDEX(number))]))
                lane = builder.insert_element(ir.Constant(inputs_type, ir.Undefined), element, _INT(0))
                broadcast = builder.shuffle_vector(lane, lane, ir.Constant(_INTS, [0] * PANEL))
                for panel, weights_of_item in enumerate(loaded):
                    added[row, panel] = add(weights_of_item[number], broadcast, added[row, panel])
        for place, value in sums.items():
            value.add_incoming(added[place], loop)
        following = builder.add(index, _INDEX(1))
        index.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, end)
        builder.position_at_end(end)
        for place, pointer in places.items():
            builder.store(added[place], pointer, align=4)
        return context.get_dummy_value()

    return signature, generate


def compiled_features() -> dict[str, bool]:
    """LLVM's names of the features that compiled functions may use: the processor's, or those that numba is told by
    NUMBA_CPU_NAME and NUMBA_CPU_FEATURES."""
    if config.CPU_NAME is None:
        return dict(llvm.get_host_cpu_features())
    given = (config.CPU_FEATURES or "").split(",")
    features = {name[1:]: name[0] == "+" for name in given if name[:1] in ("+", "-")}
    level = {"x86-64-v3": {"avx2": True, "fma": True}, "x86-64-v4": {"avx2": True, "fma": True, "avx512f": True}}
    return level.get(config.CPU_NAME, {}) | features


class Blocks(NamedTuple):
    """The most rows of a block, and the most for which four, three and two panels at once leave registers for weights
    and inputs."""

    rows: int
    four: int
    three: int
    two: int


def blocks_of(features: Mapping[str, bool]) -> Blocks:
    """From LLVM's names of the processor's features. The sums of a row and panel take one of 32 registers of AVX-512,
    two of 16 of AVX2 and four of 32 of NEON."""
    if features.get("avx512f"):
        return Blocks(8, 6, 8, 8)
    return Blocks(6, 1, 1, 2) if features.get("avx2") or features.get("neon") else Blocks(6, 0, 0, 1)


@lru_cache
def multiply(kind: int, ahead_bytes: int = 0) -> int:
    """Address of a compiled function that adds products of rows with panels of weights to outputs in float32.

    It reads int64 numbers: inputs, rows, items of a row, weights, outputs [rows, stride], stride, first panel, and the
    one after the last. Inputs are contiguous. ahead_bytes: distance of prefetched weights; 0: none are.
    """
    most_rows, four, three, two = blocks_of(compiled_features())
    item_bytes, input_bytes, sources = ITEM_BYTES[kind], INPUT_BYTES[kind], SOURCES

    def run(work):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        inputs, rows, depth, weights, outputs = work[0], work[1], work[2], work[3], work[4]
        out_stride, first, last = work[5], work[6], work[7]
        if rows == 0:
            return
        panel_bytes = depth * PANEL * item_bytes
        passes = (rows + most_rows - 1) // most_rows
        largest = (rows + passes - 1) // passes
        panels = 4 if largest <= four else 3 if largest <= three else 2 if largest <= two else 1
        for begin in range(0, depth, _DEPTH):
            count = min(_DEPTH, depth - begin)
            panel = first
            while panel < last:
                step = panels if panel + panels <= last else 1
                source = weights + panel * panel_bytes + begin * PANEL * item_bytes
                row = 0
                for left in range(passes, 0, -1):
                    some = (rows - row + left - 1) // left
                    place = (
                        inputs + input_bytes * (row * depth + begin), depth * input_bytes // 4,
                        source, panel_bytes, count,
                        outputs + 4 * (row * out_stride + panel * PANEL), out_stride,
                    )  # fmt: skip
                    if step == 4:
                        if some == 1:
                            _block(place, 1, 4, kind, ahead_bytes)
                        elif four > 1:
                            if some == 2:
                                _block(place, 2, 4, kind, ahead_bytes)
                            elif some == 3:
                                _block(place, 3, 4, kind, ahead_bytes)
                            elif some == 4:
                                _block(place, 4, 4, kind, ahead_bytes)
                            elif some == 5:
                                _block(place, 5, 4, kind, ahead_bytes)
                            else:
                                _block(place, 6, 4, kind, ahead_bytes)
                    elif step == 3:  # for more rows than four panels: seven or eight, or six beside seven
                        if three > 1:
                            if some == 6:
                                _block(place, 6, 3, kind, ahead_bytes)
                            elif some == 7:
                                _block(place, 7, 3, kind, ahead_bytes)
                            else:
                                _block(place, 8, 3, kind, ahead_bytes)
                    elif step == 2:
                        if some == 1:
                            _block(place, 1, 2, kind, ahead_bytes)
                        elif some == 2:
                            _block(place, 2, 2, kind, ahead_bytes)
                        else:
                            _block(place, 3, 2, kind, ahead_bytes)
                    elif some == 1:
                        _block(place, 1, 1, kind, ahead_bytes)
                    elif some == 2:
                        _block(place, 2, 1, kind, ahead_bytes)
                    elif some == 3:
                        _block(place, 3, 1, kind, ahead_bytes)
                    elif some == 4:
                        _block(place, 4, 1, kind, ahead_bytes)
                    elif some == 5:
                        _block(place, 5, 1, kind, ahead_bytes)
                    elif some == 6:
                        _block(place, 6, 1, kind, ahead_bytes)
                    elif most_rows > 6:
                        if some == 7:
                            _block(place, 7, 1, kind, ahead_bytes)
                        else:
                            _block(place, 8, 1, kind, ahead_bytes)
                    row += some
                panel += step

    return entry_point(run)
