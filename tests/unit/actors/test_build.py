"""How much memory keys and values take."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config

from actors.build import kv_bytes_per_token
from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.engine.warm_up import warm_up
from paceline_testing.tiny_models import make_tiny_model


def deepseek():
    config = DeepseekV3Config(
        vocab_size=97, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=12, max_position_embeddings=256,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize(
    "make",
    [lambda: make_tiny_model("llama"), lambda: make_tiny_model("gemma3"), deepseek],
    ids=["llama", "gemma3", "deepseek"],
)
def test_a_token_takes_as_many_bytes_as_the_cache_is_sized_for(make):
    model = make()
    engine = TargetEngine(model, EngineOptions(40, 4))
    warm_up(engine)
    kv = engine._runner.kv
    assert kv.num_bytes == (kv.num_slots + 1) * kv_bytes_per_token(model.config, torch.float32)
