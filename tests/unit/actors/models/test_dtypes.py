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


def test_by_default_engines_on_a_cpu_compute_in_float32_whatever_the_checkpoint_has(tmp_path):
    make_tiny_model("llama", layers=1, hidden_size=16).bfloat16().save_pretrained(tmp_path)
    source = ModelSource("tiny", "tiny", tmp_path)
    target = build_target_engine(source, TargetOptions(device="cpu", kv_cache_tokens=256))
    draft = build_draft_engine(source, DraftOptions(device="cpu", kv_cache_tokens=256))
    assert next(target.model.parameters()).dtype == torch.float32
    assert draft._runner.model.dtype == torch.float32
