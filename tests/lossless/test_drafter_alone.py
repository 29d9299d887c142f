"""A draft model can be the model: whole, or with a reduced vocabulary, of which it draws nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from actors.models.source import VOCAB_MAP_FILE
from cluster.offline.engine import LocalEngine
from paceline_testing.tiny_models import save_tiny_model

PROMPTS = [list(f"say {word} and {word} and".encode()) for word in ("oak", "elm", "ash", "fir")]
KEPT = torch.arange(40, 250, 3)
UNMAPPED = np.setdiff1d(np.arange(259), KEPT.numpy()).tolist()


@pytest.fixture(scope="module")
def drafter_dir(tmp_path_factory):
    directory = save_tiny_model(tmp_path_factory.mktemp("drafter") / "reduced", "llama", 5, layers=1, max_positions=256)
    save_file({"token_ids": KEPT}, directory / VOCAB_MAP_FILE)
    return directory


def engine(directory, **options) -> LocalEngine:
    return LocalEngine(str(directory), draft_model="none", device="cpu", kv_cache_tokens=4096, **options)


@pytest.mark.parametrize("drafters", [("none",), ("auto",)], ids="+".join)
def test_a_reduced_drafter_alone_says_what_its_own_tokens_allow(drafter_dir, drafters):
    model = AutoModelForCausalLM.from_pretrained(drafter_dir).eval()
    generations = engine(drafter_dir, drafters=drafters).generate(PROMPTS, max_new_tokens=24)
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        ids = torch.tensor([prompt])
        options = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": 24,
            "do_sample": False,
            "pad_token_id": 258,
        }
        free = model.generate(ids, **options)[0, len(prompt) :].tolist()
        assert not set(free) <= set(KEPT.tolist())  # or nothing was silenced
        assert (
            generation.token_ids == model.generate(ids, suppress_tokens=UNMAPPED, **options)[0, len(prompt) :].tolist()
        )


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_sampling_draws_mapped_tokens_only(drafter_dir, quantization):
    options = {"max_new_tokens": 64, "temperature": 2.0, "seed": 1, "repetition_penalty": 1.5}
    generations = engine(drafter_dir, quantization=quantization).generate(PROMPTS, **options)
    drawn = {token for generation in generations for token in generation.token_ids}
    assert len(drawn) > 20
    assert drawn <= set(KEPT.tolist())
