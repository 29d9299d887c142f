"""Checkpoints that are quantized themselves: fp8 is widened, others are refused by name and reason."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.engine.model_runner import ModelRunner
from actors.errors import ModelError
from actors.models.loader import load_model
from actors.models.source import ModelSource
from paceline_testing.forests import forest_of
from paceline_testing.tiny_models import save_tiny_model


@pytest.fixture
def quantized(tmp_path):
    def make(stored):
        path = save_tiny_model(tmp_path / "tiny")
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
        return ModelSource("tiny", "tiny", path)

    return make


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"bits": 4}, "quantization_config in config.json has no quant_method"),
        ({"quant_method": "exl9"}, "quantized with exl9; transformers reads .*awq.*gptq"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "quantized with awq, which cpu cannot load here: "),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "quantized with gptq, which cpu cannot load here: "),
        ({"quant_method": "compressed-tensors"}, "quantized with compressed-tensors, which cpu cannot load here: "),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "quantized with bitsandbytes, which cpu cannot"),
    ],
)
def test_what_cannot_be_loaded_here_is_refused_with_the_format_and_the_reason(quantized, stored, message):
    with pytest.raises(ModelError, match=f"model 'tiny': .*{message}") as error:
        load_model(quantized(stored))
    assert "\n" not in str(error.value)


def test_weights_are_not_quantized_twice(quantized):
    source = quantized({"quant_method": "fp8"})
    with pytest.raises(
        ModelError, match=r"quantization is 'int8'; .*'tiny' are quantized with fp8 already: it must be"
    ):
        load_model(source, quantization="int8")


BLOCK = 32


def in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """[rows of blocks, BLOCK, columns of blocks, BLOCK]"""
    return weight.view(weight.shape[0] // BLOCK, BLOCK, -1, BLOCK)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rest", [torch.float32, torch.bfloat16])  # of the checkpoint: embeddings, norms
def test_fp8_in_blocks_is_widened_on_a_cpu_and_the_engine_computes_it(tmp_path, quantized, dtype, rest):
    source = quantized({"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"})
    whole, stored = {}, {}
    for name, weight in load_file(source.path / "model.safetensors").items():
        whole[name] = stored[name] = weight.to(rest)
        if name.endswith("proj.weight"):
            scales = in_blocks(weight).abs().amax((1, 3)) / 448
            codes = (in_blocks(weight) / scales[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored[name], stored[f"{name}_scale_inv"] = codes.view(weight.shape), scales
            whole[name] = (codes.float() * scales[:, None, :, None]).view(weight.shape)
    save_file(stored, source.path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(source, dtype)
    wanted = getattr(torch, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {wanted}
    for name, weight in whole.items():
        assert torch.equal(model.get_parameter(name), weight.to(wanted)), name

    plain = ModelSource("plain", "plain", save_tiny_model(tmp_path / "plain"))
    save_file({name: weight.float() for name, weight in whole.items()}, plain.path / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    forest = forest_of([(20, 0, [], 0)])
    logits = [
        ModelRunner(one, forest.num_slots).forward(forest.batch, np.arange(20))
        for one in (model, load_model(plain, dtype))
    ]
    assert torch.equal(*logits)
