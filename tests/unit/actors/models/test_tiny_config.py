"""Configurations that are cut down keep what an architecture consists of."""

import pytest

from actors.errors import ModelError
from actors.models.random_model import random_model
from actors.models.tiny_config import config_of_type, tiny_config


def test_a_model_of_any_size_becomes_a_small_one():
    config = config_of_type("llama")
    config.num_hidden_layers, config.hidden_size, config.num_attention_heads = 80, 8192, 64
    config.num_key_value_heads, config.intermediate_size, config.vocab_size = 8, 28672, 128256
    tiny = tiny_config(config)
    assert (tiny.num_attention_heads, tiny.num_key_value_heads) == (4, 2)  # they still share keys
    assert random_model(tiny).num_parameters() < 100_000


@pytest.mark.parametrize(("key_heads", "kept"), [(64, 4), (8, 2), (1, 1)])
def test_heads_share_keys_as_before(key_heads, kept):
    config = config_of_type("qwen3")
    config.num_attention_heads, config.num_key_value_heads = 64, key_heads
    assert tiny_config(config).num_key_value_heads == kept


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma3n_text", "deepseek_v4", "dots3_note_text", "qwen3_next"])
def test_each_kind_of_layer_is_kept(model_type):
    config = config_of_type(model_type)
    tiny = tiny_config(config)
    assert set(tiny.layer_types) == set(config.layer_types)
    assert len(tiny.layer_types) == tiny.num_hidden_layers < config.num_hidden_layers


def test_layers_that_take_keys_from_others_are_kept_beside_those_they_take_them_from():
    config = config_of_type("gemma4_text")
    values = config.to_dict() | {"num_kv_shared_layers": 15}
    tiny = tiny_config(type(config).from_dict(values))
    assert tiny.num_kv_shared_layers == 2
    assert tiny.layer_types == ["sliding_attention", "full_attention"] * 2


def test_the_same_seed_makes_the_same_model_and_another_another():
    config = tiny_config(config_of_type("gpt2"))
    first, again, other = (random_model(config, seed).state_dict() for seed in (1, 1, 2))
    assert all(first[name].equal(again[name]) for name in first)
    assert not first["lm_head.weight"].equal(other["lm_head.weight"])


def test_an_unknown_model_type_is_named():
    with pytest.raises(ModelError, match="'llama9'"):
        config_of_type("llama9")
