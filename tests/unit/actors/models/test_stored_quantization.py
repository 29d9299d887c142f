"""Checkpoints that are quantized themselves: refused by name and reason where they cannot be loaded."""

from __future__ import annotations

import json

import pytest

from actors.errors import ModelError
from actors.models.loader import load_model
from actors.models.source import ModelSource
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
