"""Weights in blocks of codes: found where they are, and the very numbers that they were."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher
from torch import nn

from actors.engine.cpu_kernels import block_weights
from actors.engine.cpu_kernels.block_weights import BlockWeights, code_bits, find_blocks, grid_of
from actors.engine.cpu_kernels.panel_linear import PanelKernel, PanelLinear, Panels, has_multiply_add
from actors.engine.cpu_kernels.threads import has_openmp
from actors.engine.cpu_kernels.weight_formats import CODES4, CODES4_ROUNDED, CODES8, CODES8_ROUNDED

pytestmark = pytest.mark.skipif(
    not has_openmp() or not has_multiply_add(), reason="no OpenMP runtime, or no multiply-add that rounds once"
)

DTYPES = [torch.float32, torch.bfloat16]
FOUR_BITS, EIGHT_BITS = (Kind.Q4_0, Kind.Q4_1), (Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
DENSE = PanelKernel(in_blocks=False)


def of_kind(kind: Kind, shape: tuple[int, int], seed: int, scale: float = 0.05) -> torch.Tensor:
    """A weight as a file of that kind gives it."""
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(scale)
    return torch.from_numpy(quants.dequantize(quants.quantize(numbers, kind), kind))


def value(blocks: BlockWeights, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    wide = blocks.codes.double() * blocks.steps[..., None].double() + blocks.offsets[..., None].double()
    return wide.float().to(dtype).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*FOUR_BITS, *EIGHT_BITS])
@pytest.mark.parametrize("scale", [1e-3, 0.05, 30.0])
def test_blocks_of_gguf_files_are_found_and_are_the_same_numbers(kind, scale, dtype):
    weight = of_kind(kind, (48, 320), 1, scale).to(dtype)
    blocks = find_blocks(weight)
    assert blocks is not None
    expected = {torch.float32: (CODES4, CODES8), torch.bfloat16: (CODES4_ROUNDED, CODES8_ROUNDED)}
    assert blocks.kind == expected[dtype][kind not in FOUR_BITS]
    assert torch.equal(value(blocks, dtype), weight)
    assert code_bits(weight) == (4 if kind in FOUR_BITS else 8)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from([*FOUR_BITS, *EIGHT_BITS]),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 70),
    threads=st.integers(1, 3),
    blocks=st.integers(1, 70),
    out_features=st.integers(1, 140),
    bias=st.booleans(),
    ahead_bytes=st.sampled_from([0, 2048]),
)
def test_products_have_the_bits_of_those_with_dense_weights(
    kind, dtype, rows, threads, blocks, out_features, bias, ahead_bytes
):
    layer = nn.Linear(32 * blocks, out_features, bias=bias, dtype=dtype)
    weight = of_kind(kind, (out_features, 32 * blocks), blocks).to(dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    inputs = torch.randn(rows, 32 * blocks, generator=torch.Generator().manual_seed(rows)).to(dtype)
    coded, dense = PanelLinear(layer, PanelKernel(ahead_bytes=ahead_bytes)), PanelLinear(layer, DENSE)
    assert coded.panels.weights.dtype == torch.int32
    assert dense.panels.weights.dtype != torch.int32
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            assert torch.equal(coded(inputs), dense(inputs))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("rows", [1, 128])  # widened in registers, and in a buffer
def test_every_weight_is_read_back(kind, dtype, rows):
    weight = of_kind(kind, (40, 128), 3).to(dtype)
    panels = Panels(weight, PanelKernel())
    assert panels.weights.dtype == torch.int32
    read = torch.cat([panels(some) for some in torch.eye(128).split(rows)])
    assert torch.equal(read.T, weight.float())


def test_halves_between_two_numbers_of_bfloat16_are_rounded_to_the_even_one():
    rng = torch.Generator().manual_seed(1)
    steps = (torch.rand(64, 1, generator=rng) + 0.5).half().float()
    offsets = (-1 - 7 * torch.rand(64, 1, generator=rng)).half().float()
    codes = torch.arange(16).repeat(2)
    weight = codes * steps + offsets
    assert ((weight.view(torch.int32) & 0xFFFF) == 0x8000).sum() > 5
    rounded = weight.bfloat16()
    panels = Panels(rounded, PanelKernel())
    assert panels.weights.dtype == torch.int32
    assert torch.equal(panels(torch.eye(32)).T, rounded.float())


def test_blocks_of_different_kinds_are_stored_in_the_larger_codes():
    parts = [of_kind(kind, (32, 64), 5) for kind in (*FOUR_BITS, *EIGHT_BITS)]
    parts += [torch.zeros(3, 64), torch.full((2, 64), 0.75)]
    weight = torch.cat(parts)
    blocks = find_blocks(weight)
    assert blocks is not None
    assert blocks.kind == CODES8
    assert torch.equal(value(blocks), weight)
    assert torch.equal(Panels(weight, PanelKernel())(torch.eye(64)).T, weight)


def test_weights_that_are_no_grid_are_stored_as_they_are():
    weight = of_kind(Kind.Q4_1, (1030, 64), 7)
    assert find_blocks(weight) is not None
    for number in (torch.nan, torch.inf, -torch.inf, 3e38, weight[1029, 17] + 2.0**-22):
        for row in (0, 1029):
            spoiled = weight.clone()
            spoiled[row, 17] = number
            assert find_blocks(spoiled) is None
            assert find_blocks(spoiled.bfloat16()) is None or number == weight[1029, 17] + 2.0**-22
    weight[1029, 17] += 2.0**-20
    assert find_blocks(weight) is None
    assert torch.equal(Panels(weight, PanelKernel())(torch.eye(64)).T, weight)
    assert find_blocks(torch.randn(16, 64)) is None
    assert find_blocks(of_kind(Kind.Q4_1, (16, 64), 1)[:, :48]) is None  # half a block
    assert find_blocks(of_kind(Kind.Q4_1, (16, 64), 1).half()) is None
    assert find_blocks(torch.randn(16, 64).bfloat16()) is None
    assert code_bits(torch.randn(16, 64)) == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    step=st.floats(-1000, 1000, width=16),
    offset=st.floats(-65504, 65504, width=16),
    with_eight_bits=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_step_and_offset_give_the_stored_numbers_or_are_stored_whole(step, offset, with_eight_bits, dtype):
    codes = torch.arange(32) % 16
    weight = (codes * torch.tensor(step) + torch.tensor(offset)).expand(16, 32)
    if with_eight_bits:
        weight = torch.cat([weight, of_kind(Kind.Q8_0, (16, 32), 3)])
    weight = weight.to(dtype)
    assert torch.equal(Panels(weight, PanelKernel())(torch.eye(32)).T, weight.float())


def test_blocks_that_were_rounded_to_bfloat16_are_found_in_float32():
    weight = of_kind(Kind.Q4_1, (32, 64), 5).bfloat16()
    blocks = find_blocks(weight.float())
    assert blocks is not None
    assert blocks.kind == CODES4_ROUNDED
    assert torch.equal(Panels(weight.float(), PanelKernel())(torch.eye(64)).T, weight.float())


def test_an_offset_that_would_be_rounded_in_a_register_is_refused():
    codes = torch.arange(32) % 16
    step = torch.tensor(0.5)
    for offset, is_found in ((0.25, True), (2.0**-20, False)):
        weight = (codes * step + offset).expand(16, 32).contiguous()
        assert (find_blocks(weight) is not None) == is_found
        assert torch.equal(Panels(weight, PanelKernel())(torch.eye(32)).T, weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_rounded_to_a_grid_is_found_as_one(bits):
    weight = torch.randn(40, 96)
    rounded = grid_of(weight, bits)
    assert code_bits(rounded) == bits
    assert (rounded - weight).abs().max() < (0.3 if bits == 4 else 0.02)


def test_generators_are_not_cached():
    """Else a cache that has one and not yet its callers, as another process leaves it for a while, or for good where it
    is stopped, would let the callers be compiled no more."""
    kernels = [kernel for kernel in vars(block_weights).values() if isinstance(kernel, Dispatcher)]
    generators = [kernel for kernel in kernels if inspect.isgeneratorfunction(kernel.py_func)]
    assert generators
    assert all(isinstance(kernel._cache, NullCache) for kernel in generators)
