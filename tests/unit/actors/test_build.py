"""How engines are built: what is refused, and how much memory keys and values take."""

import copy
import logging
import sys
from contextlib import suppress
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from actors import build
from actors.build import build_draft_engine, build_target_engine
from actors.engine.kv_bytes import kv_bytes_per_token
from actors.engine.layer_shapes import layer_shapes
from actors.engine.options import EngineOptions, RoundLimits
from actors.engine.recurrent.state_bytes import recurrent_state_bytes
from actors.engine.target_engine import TargetEngine
from actors.engine.warm_up import warm_up
from actors.errors import ModelError
from actors.models.catalog import resolve_model
from actors.models.random_model import random_model
from actors.models.source import ModelSource
from actors.models.tiny_config import config_of_type, tiny_config
from actors.options import DraftOptions, TargetOptions
from paceline_testing.tiny_models import make_tiny_model, save_tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return resolve_model(str(save_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden_size=16)), None)


@pytest.fixture
def on_gpu(monkeypatch):
    """choose(capability): models are built for a GPU that is not there."""
    monkeypatch.setattr(build, "choose_device", lambda device: "cuda")

    def choose(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return choose


@pytest.mark.parametrize(("capability", "missing"), [((7, 5), "a GPU from Ampere"), ((9, 0), "Triton")])
def test_a_gpu_that_cannot_compile_the_tree_kernels_is_refused_when_the_engine_is_built(
    on_gpu, monkeypatch, source, capability, missing
):
    on_gpu(capability)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModelError, match=f"'triton_tree' with device 'cuda'; it needs {missing}.*choose 'padded'"):
        build_target_engine(source, TargetOptions(attention="triton_tree"))
    with pytest.raises(ModelError, match=f"it needs {missing}"):
        build_draft_engine(source, DraftOptions(attention="triton_tree"))


def test_bitwise_on_a_gpu_needs_triton_and_warns_that_it_is_not_proven(on_gpu, monkeypatch, source, caplog):
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    on_gpu((9, 0))
    options = TargetOptions(exact="bitwise")
    with caplog.at_level(logging.WARNING), suppress(AssertionError, RuntimeError, ModelError):
        build_target_engine(source, options)  # no GPU is here
    assert [record.message for record in caplog.records if "bitwise" in record.message] == [
        "of all GPUs, exact 'bitwise' has been tried on an H200 only"
    ]
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModelError, match="exact is 'bitwise' with device 'cuda'; without Triton it needs cpu"):
        build_target_engine(source, options)


def deepseek():
    config = DeepseekV3Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=12, max_position_embeddings=256,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tiny(kind):
    return random_model(tiny_config(config_of_type(kind)))


TINY = [
    "nemotron_h",
    "kimi_linear",
    "minimax",
    "bloom",
    "mpt",
    "falcon",
    "gemma4_text",
    "dbrx",
    "jetmoe",
    "mimo_v2_flash",
]


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_tiny_model("llama"),
        lambda: make_tiny_model("gemma3"),
        deepseek,
        *(partial(tiny, kind) for kind in TINY),
    ],
    ids=["llama", "gemma3", "deepseek", *TINY],
)
def test_a_token_takes_as_many_bytes_as_the_cache_is_sized_for(make):
    model = make()
    engine = TargetEngine(copy.deepcopy(model), EngineOptions(40, 4))
    warm_up(engine)
    kv = engine._runner.kv
    assert kv.num_bytes == (kv.num_slots + 1) * kv_bytes_per_token(model)


def test_layers_of_different_sizes_are_loaded(tmp_path):
    tiny("gemma4_text").save_pretrained(tmp_path)
    source = ModelSource("m", "m", tmp_path)
    target = build_target_engine(source, TargetOptions(dtype="float32", device="cpu", kv_cache_tokens=256))
    assert len(set(layer_shapes(target.model))) == 2
    build_draft_engine(source, DraftOptions(dtype="float32", device="cpu", kv_cache_tokens=256))


def test_states_of_all_sequences_and_their_copies_leave_less_for_keys_and_values(tmp_path, monkeypatch):
    model = tiny("qwen3_next")
    model.save_pretrained(tmp_path)
    state, token = recurrent_state_bytes(model), kv_bytes_per_token(model)
    monkeypatch.setattr(build, "_bytes_for_target", lambda *_: 8000 * token)
    limits = RoundLimits(sequences=3)
    options = TargetOptions(dtype="float32", device="cpu")
    engine = build_target_engine(ModelSource("m", "m", tmp_path), options, limits=limits)
    assert 0 < 9 * state < 4000 * token
    for_keys = int((8000 * token - 9 * state) / 1.25)
    assert engine.options.num_blocks == for_keys // token // engine.options.block_size
    kv_bytes = engine.options.num_slots * token
    assert engine.options.max_cached_states == kv_bytes // 4 // state > 0


def test_no_memory_is_kept_for_states_of_prefixes_where_none_are_cached(tmp_path, monkeypatch):
    model = tiny("qwen3_next")
    model.save_pretrained(tmp_path)
    state, token = recurrent_state_bytes(model), kv_bytes_per_token(model)
    monkeypatch.setattr(build, "_bytes_for_target", lambda *_: 8000 * token)
    options = TargetOptions(dtype="float32", device="cpu", prefix_cache=False)
    engine = build_target_engine(ModelSource("m", "m", tmp_path), options, limits=RoundLimits(sequences=3))
    assert engine.options.num_blocks == (8000 * token - 9 * state) // token // engine.options.block_size
    assert engine.options.max_cached_states == 0
