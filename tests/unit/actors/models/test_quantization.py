"""Weights in 8 and 4 bits: how near they are to the whole ones, in the kernels and without, and what is refused."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from actors.engine.cpu_kernels.block_weights import blocks_of_int4
from actors.engine.cpu_kernels.byte_product import has_byte_product
from actors.engine.cpu_kernels.kernel_choice import INT8_PRODUCTS, replace_linears
from actors.engine.cpu_kernels.panel_linear import PanelKernel, Panels, has_multiply_add
from actors.engine.cpu_kernels.threads import has_openmp
from actors.errors import ModelError
from actors.models.loader import load_draft_model, load_model
from actors.models.quantization import (
    Fp8Linear,
    Int4Linear,
    Int8Linear,
    check_int4_shard,
    largest_of_rows,
    quantize_linears,
)
from actors.models.source import VOCAB_MAP_FILE, ModelSource
from actors.models.weight_products import codes_of_int4, widened_int4
from paceline_testing.tiny_models import save_tiny_model

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear(inputs: int, outputs: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    generator = torch.Generator().manual_seed(inputs + outputs)
    layer.weight.data = torch.randn(outputs, inputs, generator=generator)
    return layer.to(dtype).requires_grad_(False)


def rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(1, count, width, generator=torch.Generator().manual_seed(count)).to(dtype)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def in_int8(layer: nn.Linear, product: str | None = None) -> Int8Linear:
    """With a product of `INT8_PRODUCTS`, or widened."""
    if product == "bytes" and not has_byte_product():
        pytest.skip("this processor has no product of bytes")
    if product == "panel" and not has_openmp():
        pytest.skip("torch has no OpenMP runtime that exports GOMP_parallel here")
    quantized = Int8Linear(layer, CPU)
    if product is not None:
        quantized.take_product(INT8_PRODUCTS[product])
    return quantized


def with_panels(layer: Int4Linear) -> Int4Linear:
    if not has_openmp() or not has_multiply_add():
        pytest.skip("no OpenMP runtime, or no multiply-add that rounds once")
    layer.take_product(lambda *numbers: Panels(blocks_of_int4(*numbers), PanelKernel()))
    return layer


KINDS = {
    "int8": in_int8,
    "int8 by panels": partial(in_int8, product="panel"),
    "int8 by bytes": partial(in_int8, product="bytes"),
    "int4": lambda layer: with_panels(Int4Linear(layer, CPU)),
    "int4 widened": lambda layer: Int4Linear(layer, CPU),
    "fp8": lambda layer: Fp8Linear(layer, CPU),
    "fp8 scaled afterwards": lambda layer: Fp8Linear(layer, CPU, scales_afterwards=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_near_those_of_the_whole_weights(kind, bias, dtype):
    bound = {"int8": 0.01, "int4": 0.1, "fp8": 0.05}[kind.split()[0]]
    layer = linear(96, 48, bias, dtype)
    quantized = KINDS[kind](layer)
    for count in (1, 4, 33):
        inputs = rows(count, 96, dtype)
        output = quantized(inputs)
        assert (output.dtype, output.shape) == (dtype, (1, count, 48))
        assert distance(output, layer.double()(inputs.double())) < bound


@pytest.mark.parametrize(
    ("kind", "plain", "bound"),
    [
        ("int8 by panels", "int8", 1e-6),
        ("int8 by bytes", "int8", 1e-4),
        ("int4", "int4 widened", 1e-5),
        ("fp8 scaled afterwards", "fp8", 1e-6),
    ],
)
def test_the_kernel_computes_what_the_widened_weights_do(kind, plain, bound):
    layer = linear(128, 64)
    fast, plain = KINDS[kind](layer), KINDS[plain](layer)
    assert distance(fast(rows(5, 128)), plain(rows(5, 128))) < bound


@pytest.mark.parametrize("product", ["panel", "bytes"])
def test_in_int8_the_bits_of_a_row_do_not_depend_on_its_company(product):
    quantized = in_int8(linear(576, 192), product)
    inputs = rows(70, 576)
    together = quantized(inputs)
    for first, last in ((0, 1), (3, 7), (20, 69)):
        assert torch.equal(quantized(inputs[:, first:last]), together[:, first:last])


@pytest.mark.parametrize("product", [None, "panel", "bytes"])
def test_rows_of_all_magnitudes_survive(product):
    layer = linear(64, 32, bias=False)
    layer.weight[3] = 0.0
    quantized = in_int8(layer, product)
    for magnitude in (1e-20, 1e-3, 1e4, 1e20):
        inputs = rows(6, 64) * magnitude
        assert distance(quantized(inputs), layer(inputs)) < 0.01
    assert torch.equal(quantized(torch.zeros(2, 64)), torch.zeros(2, 32))
    assert bool((quantized(rows(4, 64))[..., 3] == 0).all())
    largest = torch.full((1, 64), 7.0)
    assert distance(quantized(torch.cat([largest, -largest])), layer(torch.cat([largest, -largest]))) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (96, 48), (320, 80), (512, 64)])  # the last: whole tiles
@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_the_kernel_of_gpus_computes_what_the_widened_weights_do(triton_device, kind, inputs, outputs, dtype):
    layer = linear(inputs, outputs, dtype=dtype)
    bound = {torch.float32: 1e-2 if kind is not Int8Linear else 1e-6, torch.float16: 1e-2, torch.bfloat16: 1e-2}[dtype]
    fast, widened = (kind(layer, triton_device, has_kernel=has_kernel) for has_kernel in (True, False))
    for count in (1, 5, 40, 70, 257):  # the last are too many for it
        given = rows(count, inputs, dtype).to(triton_device)
        output = fast(given)
        assert (output.dtype, output.shape) == (dtype, (1, count, outputs))
        assert distance(output, widened(given)) < bound
        if count == 5:
            assert not torch.equal(output, fast(given.flip(1)))


def numpy_multiplies_rows_alike() -> bool:
    """Whether the bits of a row in a product do not depend on its place. Triton's interpreter multiplies with numpy,
    whose library for some processors computes the last rows of a matrix in another order."""
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((64, 64), np.float32) for _ in range(2))
    return np.array_equal(np.roll(left, 20, 0) @ right, np.roll(left @ right, 20, 0))


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear])
def test_in_the_kernel_of_gpus_the_bits_of_a_row_do_not_depend_on_its_company(triton_device, kind):
    if triton_device.type == "cpu" and not numpy_multiplies_rows_alike():
        pytest.skip("in numpy's products on this processor, with which Triton interprets, rows differ by their place")
    layer = kind(linear(320, 80, bias=False, dtype=torch.float16), triton_device, has_kernel=True)
    given = rows(150, 320, torch.float16).to(triton_device)
    together = layer(given)
    for first, last in ((0, 33), (3, 67), (20, 149)):  # in tiles of 64 rows
        assert torch.equal(layer(given[:, first:last]), together[:, first:last])


def test_int4_weights_are_the_same_for_any_number_of_rows():
    """A kernel that computes in bfloat16 has scales and offsets in it."""
    layer = Int4Linear(linear(320, 48, bias=False), CPU, has_kernel=True)
    scales, offsets = layer.scales_and_offsets.bfloat16().float().transpose(0, 1).split(1, dim=2)
    weight = (codes_of_int4(layer.weight) * scales + offsets).bfloat16().view(48, 320)
    assert torch.equal(layer(torch.eye(320, dtype=torch.bfloat16)), weight.T)  # too many rows for the kernel
    assert not torch.equal(widened_int4(layer.weight, layer.scales_and_offsets).bfloat16(), weight)


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [4096, 28672])
def test_what_a_kernel_is_compiled_for_depends_on_the_size_of_a_tile(triton_device, group, dtype, outputs):
    from actors.models.weight_kernels import launch_options, product_constants

    constants = [product_constants(count, 4096, outputs, group, dtype) for count in (33, 64, 65, 256)]
    assert constants.count(constants[0]) == 4
    assert constants[0]["EVEN_K"]
    assert not product_constants(64, 4096 + 16, outputs, group, dtype)["EVEN_K"]
    roomy, narrow = (launch_options(64, outputs, group, dtype, memory << 10) for memory in (227, 99))
    assert narrow["num_stages"] == min(roomy["num_stages"], 3)
    assert narrow["num_warps"] == roomy["num_warps"]


def test_the_kernel_of_gpus_can_be_traced(triton_device):
    layer = Int8Linear(linear(64, 32), triton_device, has_kernel=True)
    given = rows(5, 64)[0].to(triton_device)
    arguments = (given, layer.weight, layer.scales)
    torch.library.opcheck(torch.ops.paceline.weight_product.default, arguments, test_utils=("test_faketensor",))


def test_fp8_rounds_weights_by_output_and_activations_by_row():
    layer = linear(64, 32, bias=False)
    layer.weight[3] = 0.0
    layer.weight[5] *= 1e6
    quantized = Fp8Linear(layer, CPU)
    assert (quantized.weight.dtype, quantized.weight.nbytes) == (torch.float8_e4m3fn, layer.weight.nbytes // 4)
    weights = quantized.weight.float() * quantized.scales[:, None]
    assert ((weights - layer.weight).abs() <= 2.0**-4 * layer.weight.abs() + 2.0**-10 * quantized.scales[:, None]).all()
    inputs = rows(6, 64) * torch.tensor([1e-20, 1e-3, 1.0, 30.0, 1e4, 1e20])[:, None]
    output = quantized(inputs)
    scales = inputs.abs().amax(dim=2, keepdim=True) / 448
    rounded = (inputs / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
    torch.testing.assert_close(output, rounded @ weights.T, rtol=1e-5, atol=0)
    assert torch.equal(quantized(torch.zeros(2, 64)), torch.zeros(2, 32))
    together = quantized(rows(70, 64))
    assert torch.equal(quantized(rows(70, 64)[:, 3:7]), together[:, 3:7])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_products_without_scales_hold_the_largest_sums(dtype):
    layer = nn.Linear(4096, 16, bias=False)
    layer.weight.data = torch.full((16, 4096), 2.0**-12)
    quantized = Fp8Linear(layer.to(dtype).requires_grad_(False), CPU, scales_afterwards=True)
    inputs = torch.tensor([0.5, 1.0, 2.0], dtype=dtype)[:, None].expand(3, 4096)
    torch.testing.assert_close(quantized(inputs), inputs[:, :16])  # a sum of 4096 * 448 * 448 before it is scaled


def test_layers_whose_parts_do_not_fit_fp8_have_int8(tmp_path):
    source = ModelSource("tiny", "tiny", save_tiny_model(tmp_path / "tiny", hidden_size=48, heads=3, kv_heads=1))
    model = load_model(source, quantization="fp8")
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert kinds["model.layers.0.mlp.down_proj"] is kinds["model.layers.0.self_attn.k_proj"] is Fp8Linear
    assert kinds["lm_head"] is Int8Linear
    narrow = ModelSource("narrow", "narrow", save_tiny_model(tmp_path / "narrow", hidden_size=40, heads=5, kv_heads=1))
    assert type(load_model(narrow, quantization="fp8").model.layers[0].self_attn.k_proj) is Int8Linear  # 8 outputs


def test_a_device_that_does_not_multiply_in_fp8_is_refused(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0")

    source = ModelSource("tiny", "tiny", save_tiny_model(tmp_path / "tiny"))
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(ModelError, match=r"'tiny'.*'fp8' on device 'cpu', which does not .*: torch._scaled_mm is only"):
        load_model(source, quantization="fp8")


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
def test_int4_weights_of_all_magnitudes_survive(magnitude):
    layer = linear(64, 32, bias=False)
    layer.weight.mul_(magnitude)
    quantized = with_panels(Int4Linear(layer, CPU))
    assert distance(quantized(rows(6, 64)), layer(rows(6, 64))) < 0.1


@pytest.mark.parametrize("number", [1e5, torch.nan, -torch.inf])
def test_int4_refuses_weights_beyond_float16(number):
    layer = linear(64, 32, bias=False)
    layer.weight[3, 5] = number
    with pytest.raises(ModelError, match=r"quantization is 'int4'; the largest weight .* must be at most 65504"):
        Int4Linear(layer, CPU)


def test_int4_names_the_layer_of_a_weight_beyond_float16_when_it_loads(tmp_path):
    path = save_tiny_model(tmp_path / "tiny", hidden_size=64)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e6
    model.save_pretrained(path)
    with pytest.raises(
        ModelError, match=r"'tiny': model.layers.1.mlp.up_proj: quantization is 'int4'; .* is 1e\+06; it"
    ):
        load_model(ModelSource("tiny", "tiny", path), quantization="int4")


def test_int4_takes_a_quarter_of_the_bytes_of_float16():
    layer = linear(512, 512, bias=False, dtype=torch.float16)
    held = sum(buffer.nbytes for buffer in Int4Linear(layer, CPU).buffers())
    assert held == layer.weight.nbytes * (4 + 2 * 16 / 32) / 16  # 4 bits, scale and offset of 16 for 32 of them
    assert with_panels(Int4Linear(layer, CPU)).product.weights.nbytes == held


def test_layers_that_int4_does_not_fit_have_int8_and_none_is_packed_again(tmp_path):
    source = ModelSource("tiny", "tiny", save_tiny_model(tmp_path / "tiny", hidden_size=64))
    model = load_model(source, quantization="int4")
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert kinds["model.layers.0.mlp.down_proj"] is Int4Linear
    assert kinds["lm_head"] is Int8Linear
    assert nn.Linear not in kinds.values()
    replace_linears(model)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    narrow = ModelSource("narrow", "narrow", save_tiny_model(tmp_path / "narrow", hidden_size=48))
    layer = load_model(narrow, quantization="int4").model.layers[0]
    assert type(layer.self_attn.q_proj) is Int8Linear  # 48 inputs
    assert type(layer.mlp.down_proj) is Int4Linear  # 96 inputs


def test_a_reduced_draft_model_is_quantized_after_its_rows_were_taken(tmp_path):
    source = ModelSource("tiny", "tiny", save_tiny_model(tmp_path / "tiny", hidden_size=64))
    kept = torch.arange(3, 259, 2)
    save_file({"token_ids": kept}, source.path / VOCAB_MAP_FILE)
    whole = load_draft_model(source)
    draft = load_draft_model(source, quantization="int8")
    assert torch.equal(draft.token_ids, kept)
    ids = torch.arange(60, 80).unsqueeze(0)
    logits = draft.model(ids).logits
    assert logits.shape[-1] == len(kept)
    assert distance(logits, whole.model(ids).logits) < 0.05


@pytest.mark.parametrize("kind", [Int8Linear, Int4Linear, Fp8Linear])
@pytest.mark.parametrize("by_input", [True, False])
def test_the_parts_of_ranks_are_slices_of_the_whole(kind, by_input):
    whole = linear(192, 96, bias=False)
    quantized = kind(whole, CPU)
    wide = quantized(torch.eye(192)[None])[0].T  # [outputs, inputs]
    maxima = {"row_maxima": largest_of_rows(whole.weight)} if kind in (Int8Linear, Fp8Linear) else {}
    for rank, part in enumerate(whole.weight.chunk(3, dim=1 if by_input else 0)):
        shard = nn.Linear(part.shape[1], part.shape[0], bias=False)
        shard.weight = nn.Parameter(part.clone(), requires_grad=False)
        own = {name: value if by_input else value.chunk(3)[rank] for name, value in maxima.items()}
        found = kind(shard, CPU, **own)(torch.eye(part.shape[1])[None])[0].T
        assert torch.equal(found, wide.chunk(3, dim=1 if by_input else 0)[rank])


def test_parts_that_cut_groups_of_int4_are_refused():
    with pytest.raises(ModelError, match=r"tensor_parallel 3; the 64 inputs of x do not divide into 3 multiples of 32"):
        check_int4_shard("x", nn.Linear(64, 96), 3)
    check_int4_shard("x", nn.Linear(96, 48), 3)


def saved(path, model) -> ModelSource:
    model.save_pretrained(path)
    return ModelSource(path.name, path.name, path)


def test_tied_embeddings_stay_whole_and_biases_are_loaded(tmp_path):
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, tie_word_embeddings=True,
    )  # fmt: skip
    whole = LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in whole.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    model = load_model(saved(tmp_path / "tied", whole), quantization="int8")
    assert type(model.lm_head) is type(model.model.layers[1].self_attn.q_proj) is Int8Linear
    assert torch.equal(model.get_input_embeddings().weight, whole.get_input_embeddings().weight)
    assert torch.equal(model.model.layers[1].self_attn.q_proj.bias, whole.model.layers[1].self_attn.q_proj.bias)
    quantize_linears(whole, "int8", CPU)
    ids = torch.arange(10, 30).unsqueeze(0)
    assert torch.equal(model(ids).logits, whole(ids).logits)


_PEAK = """
import sys, torch
from pathlib import Path
from actors.models.loader import load_model
from actors.models.quantization import quantize_linears
from actors.models.source import ModelSource

def memory(field):
    status = Path("/proc/self/status").read_text()
    return int(status.partition(field + ":")[2].split()[0]) * 1024

source, tiny = (ModelSource(Path(name).name, Path(name).name, Path(name)) for name in sys.argv[1:3])
for how, *afterwards in map(str.split, sys.argv[3:]):
    load_model(tiny, quantization=how)  # loads what code there is
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    if afterwards:
        quantize_linears(load_model(source), how, torch.device("cpu"))
    else:
        load_model(source, quantization=how)
    print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read from Linux's /proc")
def test_a_quantized_load_never_holds_the_whole_weights(tmp_path):
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=4,
    )  # fmt: skip
    big = saved(tmp_path / "big", LlamaForCausalLM(config))
    tiny = save_tiny_model(tmp_path / "tiny")
    whole = sum(file.stat().st_size for file in big.path.glob("*.safetensors"))
    assert whole > 150 << 20

    # Memory goes back when it is freed, so that the peak is what was needed at once.
    settings = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", _PEAK, big.path, tiny, "int8", "int4", "int8 afterwards"]
    told = subprocess.check_output(command, text=True, env=settings)
    in_int8, in_int4, afterwards = (int(line) for line in told.split()[-3:])
    largest = 1024 * 2816 * 4  # bytes of a weight
    assert in_int8 < whole / 4 + 5 * largest
    assert in_int4 < whole / 5 + 5 * largest
    assert afterwards > whole


def test_what_cannot_be_quantized_is_refused_with_field_value_and_limit():
    with pytest.raises(ModelError, match=r"quantization is 'int8'; Sequential has no linear layers"):
        quantize_linears(nn.Sequential(nn.ReLU()), "int8", CPU)
