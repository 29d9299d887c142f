"""What `dtype: auto` means."""

import pytest
import torch
from transformers import LlamaConfig

from actors.build import build_draft_engine, build_target_engine
from actors.models.dtypes import choose_dtype
from actors.models.source import ModelSource
from actors.options import DraftOptions, TargetOptions
from paceline_testing.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    ("asked", "stored", "device", "dtype"),
    [
        ("auto", torch.bfloat16, "cuda:1", "bfloat16"),
        ("auto", torch.float16, "cuda", "float16"),
        ("auto", torch.float32, "cuda", "bfloat16"),
        ("auto", None, "cuda", "bfloat16"),
        ("auto", torch.bfloat16, "cpu", "float32"),
        ("float32", torch.bfloat16, "cuda", "float32"),
        ("bfloat16", torch.float32, "cpu", "bfloat16"),
    ],
)
def test_auto_is_16_bits_on_a_gpu_and_what_is_asked_for_stays(asked, stored, device, dtype):
    config = LlamaConfig() if stored is None else LlamaConfig(dtype=stored)
    assert choose_dtype(asked, config, device) == dtype


@pytest.mark.parametrize(
    ("stored", "fastest", "dtype"),
    [
        (torch.bfloat16, "bfloat16", "bfloat16"),
        (torch.bfloat16, "float32", "float32"),
        (torch.float16, "bfloat16", "float32"),
        (torch.float32, "bfloat16", "float32"),
    ],
)
def test_on_a_cpu_only_a_checkpoint_in_bfloat16_is_computed_so_and_only_where_it_is_faster(stored, fastest, dtype):
    asked = []
    config = LlamaConfig(hidden_size=64, intermediate_size=96, dtype=stored)
    assert choose_dtype("auto", config, "cpu", lambda *shape: asked.append(shape) or fastest) == dtype
    assert asked == ([(64, 96)] if stored == torch.bfloat16 else [])


@pytest.mark.parametrize("fastest", ["float32", "bfloat16"])
def test_engines_on_a_cpu_compute_in_the_fastest_dtype_but_for_bitwise_mode(tmp_path, monkeypatch, fastest):
    monkeypatch.setattr("actors.build.fastest_dtype", lambda *_: fastest)
    make_tiny_model("llama", layers=1, hidden_size=16).bfloat16().save_pretrained(tmp_path)
    source = ModelSource("tiny", "tiny", tmp_path)
    target = build_target_engine(source, TargetOptions(device="cpu", kv_cache_tokens=256))
    exact = build_target_engine(source, TargetOptions(device="cpu", kv_cache_tokens=256, exact="bitwise"))
    draft = build_draft_engine(source, DraftOptions(device="cpu", kv_cache_tokens=256))
    assert next(target.model.parameters()).dtype == draft._runner.model.dtype == getattr(torch, fastest)
    assert next(exact.model.parameters()).dtype == torch.float32
