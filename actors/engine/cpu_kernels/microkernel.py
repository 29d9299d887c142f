"""Products of a few rows with a weight matrix on CPU, near the speed at which the weights can be read.

Weights are stored in panels of 16 outputs, [panels, in_features, 16], so that each vector of a panel is loaded once and
multiplied with an element of every row: the register blocking of Goto and van de Geijn, "Anatomy of High-Performance
Matrix Multiplication", 2008. Libraries choose their blocks for hundreds of rows; a round has a few. The loop over
in_features is LLVM IR without a word about the instruction set: LLVM takes SSE, AVX2, AVX-512 or NEON as there is.

An output is the sum over in_features in ascending order in one accumulator, for any number of rows. So a row's
bits depend neither on the other rows nor on its place among them.

Processors with AVX512-BF16 can multiply pairs of bfloat16 weights with pairs of bfloat16 inputs; some are slower at it.
Weights in codes are made float32 in registers where few rows need them, and once in a buffer for all where many do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import NamedTuple

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from actors.engine.cpu_kernels.addresses import keep_alive
from actors.engine.cpu_kernels.entry_points import SOURCES, entry_point
from actors.engine.cpu_kernels.weight_formats import (
    BFLOAT16,
    BFLOAT16_PAIRS,
    BYTE,
    CODE_BITS,
    CODES4,
    CODES4_ROUNDED,
    CODES8,
    CODES8_ROUNDED,
    FLOAT,
    FLOAT16,
    FLOAT32,
    FORMATS,
    INDEX,
    INT,
    INT8,
    INTS,
    PANEL,
    VECTOR,
    item_reader,
)

_SHARE_BYTES = 64 << 10  # of a panel between two stores of the sums: it stays in the second-level cache
# Distance of prefetched weights. Some processors need 4 to 25 % fewer seconds with it, others 10 to 20 % more.
AHEAD_BYTES = 2048
_LINE_BYTES = 64
# Passes over stored weights; for more rows, weights are widened once, into a buffer. Those in FLOAT32 need no widening,
# and those in BFLOAT16_PAIRS are multiplied as they are.
_MOST_PASSES = {BFLOAT16: 3, FLOAT16: 3, INT8: 3, CODES4: 2, CODES8: 2, CODES4_ROUNDED: 1, CODES8_ROUNDED: 1}
_MOST_WIDE_ROWS = 5  # of a block of widened weights with 16 registers: of six rows, LLVM may keep sums in memory


class _BFloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * PANEL)


def _multiply_add(builder: ir.IRBuilder, kind: int) -> Callable[[ir.Value, ir.Value, ir.Value], ir.Value]:
    """weights, an input in all places, sums -> the sums with the products."""
    if kind == BFLOAT16_PAIRS:
        add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(VECTOR, [VECTOR, _PAIRS, _PAIRS]), "llvm.x86.avx512bf16.dpbf16ps.512"
        )
        return lambda weights, inputs, sums: builder.call(
            add, [sums, builder.bitcast(weights, _PAIRS), builder.bitcast(inputs, _PAIRS)]
        )
    add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), f"llvm.fmuladd.v{PANEL}f32"
    )
    return lambda weights, inputs, sums: builder.call(add, [weights, inputs, sums])


@intrinsic(prefer_literal=True)
def _block(context, place, rows, panels, kind, ahead_bytes):  # type: ignore[no-untyped-def]
    """outputs[r, 16 p + i] += sum over d of inputs[r, d] * weights[p, d, i], for rows and panels that `Blocks.shapes`
    has. kind and ahead_bytes are literals.

    place: inputs, in_stride, weights, panel_bytes, depth, outputs, out_stride: addresses, strides in elements, and the
    number of items.
    """
    stored, ahead = kind.literal_value, ahead_bytes.literal_value
    signature = types.void(types.UniTuple(types.intp, 7), types.intp, types.intp, kind, ahead_bytes)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        shapes = blocks_of(compiled_features(), stored).shapes()
        end = builder.append_basic_block("end")
        shape = builder.add(builder.mul(args[1], INDEX(PANEL)), args[2])
        switch = builder.switch(shape, end)
        for num_rows, num_panels in shapes:
            case = builder.append_basic_block(f"rows{num_rows}panels{num_panels}")
            switch.add_case(INDEX(num_rows * PANEL + num_panels), case)
            builder.position_at_end(case)
            _block_of(builder, cgutils.unpack_tuple(builder, args[0]), num_rows, num_panels, stored, ahead)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


def _block_of(
    builder: ir.IRBuilder, place: list[ir.Value], num_rows: int, num_panels: int, stored: int, ahead_bytes: int
) -> None:
    inputs, in_stride, weights, panel_bytes, depth, outputs, out_stride = place
    add, item_bytes = _multiply_add(builder, stored), PANEL * FORMATS[stored].item_bytes
    input_type = INT if stored == BFLOAT16_PAIRS else FLOAT
    inputs_type = ir.VectorType(input_type, PANEL)
    inputs_of_item = FORMATS[stored].input_bytes // 4
    first_input = builder.inttoptr(inputs, input_type.as_pointer())
    first_output = builder.inttoptr(outputs, FLOAT.as_pointer())
    row_inputs = [builder.gep(first_input, [builder.mul(in_stride, INDEX(row))]) for row in range(num_rows)]
    panels = [builder.add(weights, builder.mul(panel_bytes, INDEX(panel))) for panel in range(num_panels)]
    sums_at = {
        (row, panel): builder.bitcast(
            builder.gep(first_output, [builder.add(builder.mul(out_stride, INDEX(row)), INDEX(panel * PANEL))]),
            VECTOR.as_pointer(),
        )
        for row in range(num_rows)
        for panel in range(num_panels)
    }
    before = {at: builder.load(pointer, align=4) for at, pointer in sums_at.items()}
    entry = builder.block
    loop, end = builder.append_basic_block("depths"), builder.append_basic_block("stored")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(INDEX)
    index.add_incoming(INDEX(0), entry)
    sums = {at: builder.phi(VECTOR) for at in sums_at}
    for at, value in sums.items():
        value.add_incoming(before[at], entry)
    begin = builder.mul(index, INDEX(item_bytes))
    items = [builder.add(panel, begin) for panel in panels]
    if ahead_bytes:
        items_ahead = ahead_bytes // item_bytes
        # After the last item of these panels comes the first of the next ones.
        is_beyond = builder.icmp_signed(">=", builder.add(index, INDEX(items_ahead)), depth)
        skipped = builder.select(is_beyond, builder.mul(panel_bytes, INDEX(num_panels - 1)), INDEX(0))
        for item in items:
            for line in range(0, item_bytes, _LINE_BYTES):
                _prefetch(builder, builder.add(builder.add(item, skipped), INDEX(items_ahead * item_bytes + line)))
    readers = [item_reader(builder, stored, item) for item in items]
    added = dict(sums)
    first_of_item = builder.mul(index, INDEX(inputs_of_item))
    for number in range(inputs_of_item):
        read = [reader(number) for reader in readers]
        for row, pointer in enumerate(row_inputs):
            element = builder.load(builder.gep(pointer, [builder.add(first_of_item, INDEX(number))]))
            lane = builder.insert_element(ir.Constant(inputs_type, ir.Undefined), element, INT(0))
            broadcast = builder.shuffle_vector(lane, lane, ir.Constant(INTS, [0] * PANEL))
            for panel, vector in enumerate(read):
                added[row, panel] = add(vector, broadcast, added[row, panel])
    for at, value in sums.items():
        value.add_incoming(added[at], loop)
    following = builder.add(index, INDEX(1))
    index.add_incoming(following, loop)
    again = builder.cbranch(builder.icmp_signed("<", following, depth), loop, end)
    if _has_few_registers(compiled_features()):
        again.set_metadata("llvm.loop", _not_unrolled(builder.module))
    builder.position_at_end(end)
    for at, pointer in sums_at.items():
        builder.store(added[at], pointer, align=4)


def _not_unrolled(module: ir.Module) -> ir.MDValue:
    """Metadata of a loop that LLVM is not to unroll. Of several turns at once it may keep sums in memory."""
    loop = module.add_metadata([module.add_metadata(["llvm.loop.unroll.disable"])])
    if loop.operands[0] is not loop:  # the module's loops share the node, whose first operand is itself
        loop.operands = (loop, *loop.operands)
    return loop


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), *[INT] * 3])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    # To be read, kept in all caches, data
    builder.call(prefetch, [builder.inttoptr(address, BYTE.as_pointer()), INT(0), INT(3), INT(1)])


@intrinsic(prefer_literal=True)
def _widen(context, items, count, floats, kind):  # type: ignore[no-untyped-def]
    """Make float32 [count * inputs, 16] at an address of items at another, for a literal kind."""
    stored = kind.literal_value

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        item_bytes, inputs = PANEL * FORMATS[stored].item_bytes, FORMATS[stored].inputs
        with cgutils.for_range(builder, args[1]) as loop:
            read = item_reader(builder, stored, builder.add(args[0], builder.mul(loop.index, INDEX(item_bytes))))
            first = builder.inttoptr(
                builder.add(args[2], builder.mul(loop.index, INDEX(inputs * PANEL * 4))), VECTOR.as_pointer()
            )
            for number in range(inputs):
                builder.store(read(number), builder.gep(first, [INDEX(number)]), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, kind), generate


def compiled_features() -> dict[str, bool]:
    """LLVM's names of the features that compiled functions may use: those of NUMBA_CPU_NAME and NUMBA_CPU_FEATURES if
    set, else the processor's."""
    if config.CPU_NAME is None:
        return dict(_host_features())
    given = (config.CPU_FEATURES or "").split(",")
    features = {name[1:]: name[0] == "+" for name in given if name[:1] in ("+", "-")}
    level = {"x86-64-v3": {"avx2": True, "fma": True}, "x86-64-v4": {"avx2": True, "fma": True, "avx512f": True}}
    return level.get(config.CPU_NAME, {}) | features


@cache
def _host_features() -> dict[str, bool]:
    """LLVM takes a third of a millisecond for it, and each layer asks."""
    return dict(llvm.get_host_cpu_features())


class Blocks(NamedTuple):
    """The most rows of a block, and the most for which four, three and two panels at once leave registers for weights
    and inputs."""

    rows: int
    four: int
    three: int
    two: int

    def panels(self, rows: int) -> int:
        """How many at once, with blocks of so many rows."""
        return 4 if rows <= self.four else 3 if rows <= self.three else 2 if rows <= self.two else 1

    def shapes(self) -> list[tuple[int, int]]:
        """The (rows, panels) that there are. Rows are shared out evenly, so that some blocks have one less than the
        largest; panels that are left over go one at a time."""
        whole = {(rows - less, self.panels(rows)) for rows in range(1, self.rows + 1) for less in (0, 1) if rows > less}
        return sorted(whole | {(rows, 1) for rows in range(1, self.rows + 1)})


def blocks_of(features: Mapping[str, bool], kind: int = FLOAT32) -> Blocks:
    """From LLVM's names of the processor's features. The sums of a row and panel take one of 32 registers of AVX-512,
    two of 16 of AVX2 and four of 32 of NEON. Codes need registers for steps and offsets."""
    if features.get("avx512f"):
        return Blocks(8, 1, 1, 8) if kind in CODE_BITS else Blocks(8, 6, 8, 8)
    if kind in CODE_BITS:
        return Blocks(4, 0, 0, 0)
    return Blocks(6, 1, 1, 2) if features.get("avx2") or features.get("neon") else Blocks(6, 0, 0, 1)


def _has_few_registers(features: Mapping[str, bool]) -> bool:
    """16 for vectors, and not 32."""
    return not (features.get("avx512f") or features.get("neon"))


@lru_cache
def multiply(kind: int, ahead_bytes: int = 0) -> int:
    """Address of a compiled function that adds products of rows with panels of weights to outputs in float32.

    It reads int64 numbers: inputs, rows, items of a row, weights, outputs [rows, stride], stride, first panel, and the
    one after the last. Inputs are contiguous. ahead_bytes: distance of prefetched weights; 0: none are.
    """
    item_bytes, inputs_of_item, input_bytes = FORMATS[kind]
    can_widen, most_passes, sources = kind in _MOST_PASSES, _most_passes(kind), SOURCES
    most_stored, most_wide = _SHARE_BYTES // (PANEL * item_bytes), _SHARE_BYTES // (PANEL * 4 * inputs_of_item)
    wide_bytes = most_wide * inputs_of_item * PANEL * 4
    panels_of_rows, panels_of_wide_rows = _panels_by_rows(kind), _panels_by_rows(FLOAT32)
    if _has_few_registers(compiled_features()):
        panels_of_wide_rows = panels_of_wide_rows[: _MOST_WIDE_ROWS + 1]

    def run(work):  # type: ignore[no-untyped-def]
        sources  # noqa: B018 - a part of the key of numba's cache
        inputs, rows, depth, weights, outputs = work[0], work[1], work[2], work[3], work[4]
        out_stride, first, last = work[5], work[6], work[7]
        if rows == 0:
            return
        by_rows, most_items, is_widened, wide = panels_of_rows, most_stored, False, 0
        if can_widen:
            is_widened = rows > most_passes * (len(panels_of_rows) - 1)
            if is_widened:
                by_rows, most_items = panels_of_wide_rows, most_wide
        most_rows = len(by_rows) - 1
        passes = (rows + most_rows - 1) // most_rows
        panels = by_rows[(rows + passes - 1) // passes]
        if can_widen:
            buffer = np.empty(panels * wide_bytes // 4 if is_widened else 0, np.float32)
            wide = buffer.ctypes.data
        panel_bytes = depth * PANEL * item_bytes
        for begin in range(0, depth, most_items):
            count = min(most_items, depth - begin)
            panel = first
            while panel < last:
                step = panels if panel + panels <= last else 1
                source = weights + panel * panel_bytes + begin * PANEL * item_bytes
                if can_widen and is_widened:
                    for number in range(step):
                        _widen(source + number * panel_bytes, count, wide + number * wide_bytes, kind)
                row = 0
                for left in range(passes, 0, -1):
                    some = (rows - row + left - 1) // left
                    own_inputs, stride = inputs + input_bytes * (row * depth + begin), depth * input_bytes // 4
                    own_outputs = outputs + 4 * (row * out_stride + panel * PANEL)
                    if not is_widened:
                        place = (own_inputs, stride, source, panel_bytes, count, own_outputs, out_stride)
                        _block(place, some, step, kind, ahead_bytes)
                    elif can_widen:
                        wide_count = count * inputs_of_item
                        place = (own_inputs, stride, wide, wide_bytes, wide_count, own_outputs, out_stride)
                        _block(place, some, step, FLOAT32, 0)
                    row += some
                panel += step
        if can_widen:
            keep_alive(buffer)

    return entry_point(run)


def _most_passes(kind: int) -> int:
    if kind in CODE_BITS and _has_few_registers(compiled_features()):
        return 1
    return _MOST_PASSES.get(kind, 0)


def _panels_by_rows(kind: int) -> np.ndarray:
    """How many panels at once, by the rows of a block."""
    blocks = blocks_of(compiled_features(), kind)
    return np.array([0, *(blocks.panels(rows) for rows in range(1, blocks.rows + 1))])
