"""Products by panels against torch's in float64, for every shape, format and number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from numba import config
from torch import nn

from actors.engine.cpu_kernels.microkernel import AHEAD_BYTES, _not_unrolled, blocks_of, compiled_features
from actors.engine.cpu_kernels.panel_linear import PanelKernel, PanelLinear, has_bfloat16_pairs
from actors.engine.cpu_kernels.threads import has_openmp

pytestmark = pytest.mark.skipif(not has_openmp(), reason="torch has no OpenMP runtime that exports GOMP_parallel here")

_EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def linear(in_features: int, out_features: int, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    generator = torch.Generator().manual_seed(in_features * 1000 + out_features)
    made = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
        parameter.requires_grad_(False)
    return made


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 34),
    in_features=st.sampled_from([1, 3, 64, 200, 1024, 1025, 2100]),
    out_features=st.integers(1, 140),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    ahead_bytes=st.sampled_from([0, AHEAD_BYTES]),
)
def test_outputs_are_the_products_to_within_rounding(rows, in_features, out_features, bias, dtype, ahead_bytes):
    layer = linear(in_features, out_features, bias=bias, dtype=dtype)
    inputs = torch.randn(1, rows, in_features, generator=torch.Generator().manual_seed(rows)).to(dtype)
    outputs = PanelLinear(layer, PanelKernel(ahead_bytes=ahead_bytes))(inputs)
    exact = nn.functional.linear(inputs.double(), layer.weight.double(), layer.bias.double() if bias else None)
    magnitude = nn.functional.linear(inputs.double().abs(), layer.weight.double().abs()) + 1.0
    assert outputs.dtype == dtype
    assert outputs.shape == exact.shape
    assert ((outputs.double() - exact).abs() <= magnitude * (2.0**-18) + exact.abs() * _EPSILON[dtype]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_depend_neither_on_other_rows_nor_on_its_place(dtype):
    layer = PanelLinear(linear(1100, 120, dtype=dtype))
    inputs = torch.randn(23, 1100).to(dtype)
    together = layer(inputs)
    for count in (1, 2, 3, 5, 8, 13):
        for first in range(0, 23 - count, 4):
            assert torch.equal(layer(inputs[first : first + count]), together[first : first + count])


def test_pairs_of_bfloat16_are_multiplied_where_the_processor_can():
    has_instructions = sys.platform == "linux" and "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    assert has_bfloat16_pairs() == has_instructions
    for layer in (linear(64, 32), linear(64, 32, dtype=torch.float16)):  # inputs of 32 bits would be rounded
        with pytest.raises(RuntimeError, match="pairs"):
            PanelLinear(layer, PanelKernel(rounds_inputs=True))
    for in_features in (64, 63):
        layer = linear(in_features, 32, dtype=torch.bfloat16)
        inputs = torch.randn(3, in_features).bfloat16()
        if has_instructions:
            assert torch.allclose(
                PanelLinear(layer, PanelKernel(rounds_inputs=True))(inputs), layer(inputs), rtol=0.02, atol=0.02
            )
        else:
            with pytest.raises(RuntimeError, match="pairs"):
                PanelLinear(layer, PanelKernel(rounds_inputs=True))


def test_masked_features_are_those_that_numba_is_told(monkeypatch):
    monkeypatch.setattr(config, "CPU_NAME", "x86-64-v3")
    monkeypatch.setattr(config, "CPU_FEATURES", "-avx512f,+f16c")
    assert compiled_features() == {"avx2": True, "fma": True, "avx512f": False, "f16c": True}
    assert blocks_of(compiled_features()) == (6, 1, 1, 2)


def test_the_bits_do_not_depend_on_the_number_of_threads():
    layer, inputs = PanelLinear(linear(300, 1000)), torch.randn(7, 300)
    outputs = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        outputs.append(layer(inputs))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_weights_of_16_bits_take_half_the_bytes_and_give_the_same_bits(dtype):
    layer = linear(96, 80)
    layer.weight.data = layer.weight.to(dtype).float()
    narrow = PanelLinear(layer)
    assert narrow.panels.weights.dtype == dtype
    wide = linear(96, 96)
    wide.weight.data = torch.cat([layer.weight, torch.full((16, 96), 1.0 + 2.0**-20)])  # the last panel needs 32 bits
    inputs = torch.randn(5, 96)
    assert PanelLinear(wide).panels.weights.dtype == torch.float32
    assert torch.equal(PanelLinear(wide)(inputs)[:, :80], narrow(inputs))


def test_inputs_that_are_views_are_read_right():
    layer, wide = linear(32, 48), torch.randn(6, 64)
    panels = PanelLinear(layer)
    assert torch.equal(panels(wide[:, :32]), panels(wide[:, :32].contiguous()))
    assert torch.equal(panels(wide[::2, :32].unsqueeze(0)), panels(wide[::2, :32].contiguous()).unsqueeze(0))


def test_the_metadata_of_a_loop_begins_with_itself_once_however_many_loops_a_module_has():
    module = ir.Module()
    loops = [_not_unrolled(module) for _ in range(3)]
    for loop in loops:
        itself, option = loop.operands
        assert itself is loop
        assert "llvm.loop.unroll.disable" in str(option)


def test_blocks_fit_into_the_registers_of_each_instruction_set():
    for features, registers, of_sums in (
        ({"avx512f": True, "avx2": True}, 32, 1),
        ({"avx2": True, "avx512f": False}, 16, 2),
        ({"neon": True}, 32, 4),
        ({}, 16, 4),
    ):
        blocks = blocks_of(features)
        for panels, rows in zip((4, 3, 2, 1), (blocks.four, blocks.three, blocks.two, blocks.rows), strict=True):
            # A panel's weights and a broadcast input need registers, too; a panel alone may spill its sums.
            assert panels == 1 or rows * panels * of_sums + of_sums + 1 <= registers or rows == 1


_PRODUCT = """
import torch
from actors.engine.cpu_kernels.block_weights import grid_of
from actors.engine.cpu_kernels.panel_linear import PanelKernel, PanelLinear, Panels, has_multiply_add
torch.manual_seed(1)
for bits in (4, 8):
    weight = grid_of(torch.randn(100, 320), bits)
    panels, dense = Panels(weight, PanelKernel()), Panels(weight, PanelKernel(in_blocks=False))
    assert (panels.weights.dtype == torch.int32) == has_multiply_add()
    for rows in (1, 2, 4, 8, 9, 30):
        inputs = torch.randn(rows, 320)
        assert torch.equal(panels(inputs), dense(inputs)), (bits, rows)
for dtype, atol in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
    layer = torch.nn.Linear(500, 100, dtype=dtype)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9):
        inputs = torch.randn(rows, 500, dtype=dtype)
        assert torch.allclose(PanelLinear(layer)(inputs), layer(inputs), atol=atol), (dtype, rows)
print("right")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="names processors of x86-64")
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3"])
def test_processors_with_fewer_instructions_get_right_products(processor, tmp_path):
    masked = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _PRODUCT]
    done = subprocess.run(command, env=os.environ | masked, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "right\n", done.stderr
