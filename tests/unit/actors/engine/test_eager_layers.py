"""Parts of uncompiled models in one kernel each, against themselves as transformers has them."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from actors.engine.eager_layers import DeviceRmsNorm, RotaryTable, fuse_eager_layers
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from paceline_testing.tiny_models import TINY_KINDS, make_tiny_model
from tests.unit.actors.engine.test_device_rounds import SAMPLINGS, VOCAB, Rounds

FUSED = {"llama": (5, True), "qwen3": (9, True)}  # norms of two layers, of which two are of heads, and the last


@pytest.mark.parametrize("kind", TINY_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_fused_parts_computes_the_same(triton_device, kind, dtype):
    model = make_tiny_model(kind, vocab_size=VOCAB, layers=2).to(triton_device, dtype)
    plain = copy.deepcopy(model)
    fuse_eager_layers(model)
    norms = sum(isinstance(module, DeviceRmsNorm) for module in model.modules())
    tables = sum(isinstance(module, RotaryTable) for module in model.modules())
    is_rounded = dtype == torch.float32 or triton_device.type == "cuda"  # the interpreter cuts to bfloat16
    if kind in FUSED and is_rounded:
        assert (norms, tables > 0) == FUSED[kind]
    if not is_rounded:
        assert norms == 0, "what differs stays"
    ids = torch.arange(11, device=triton_device)[None]
    with torch.inference_mode():
        ours, theirs = (each(ids, position_ids=ids + 3).logits.float().cpu() for each in (model, plain))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 if dtype == torch.float32 else 4e-2)


def test_a_table_has_the_bits_of_the_rotary_embedding(triton_device):
    model = make_tiny_model("llama", vocab_size=VOCAB).to(triton_device, torch.bfloat16)
    like, rotary = model.lm_head.weight[:0], model.model.rotary_emb
    places = torch.tensor([[5, 0, 63, 63, 1]], device=triton_device)
    for ours, theirs in zip(RotaryTable(rotary, 64, like)(like, places), rotary(like, places), strict=True):
        assert torch.equal(ours, theirs)


def test_a_rotation_that_depends_on_more_than_the_position_stays(triton_device):
    model = make_tiny_model("llama", vocab_size=VOCAB).to(triton_device)
    model.model.rotary_emb.rope_type = "dynamic"
    fuse_eager_layers(model)
    assert not isinstance(model.model.rotary_emb, RotaryTable)


def test_an_eager_engine_says_what_the_host_says(triton_device):
    said = []
    for attention in ("padded", "triton_tree"):
        model = make_tiny_model("llama", vocab_size=VOCAB, hidden_size=32).to(triton_device)
        engine = TargetEngine(model, EngineOptions(128, 4, attention=attention, is_eager=True))
        assert isinstance(model.model.rotary_emb, RotaryTable) == (attention == "triton_tree")
        rounds = Rounds(engine, 7, SAMPLINGS)
        for length in (7, 2):
            rounds.start(length)
        said.append([rounds.step(num_successors=2) for _ in range(3)])
    assert said[0] == said[1]
