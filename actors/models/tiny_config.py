"""Cuts a configuration of any architecture down to a model of some ten thousand weights with the same kinds of layers.

Sizes are recognised by their names, which most architectures share. `_OVERRIDES` has what the names do not say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actors.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCAB_SIZE = 97
SLIDING_WINDOW = 6  # shorter than the texts of the check
MAX_POSITIONS = 128

_HEADS, _HEAD_DIM = 4, 16
_HIDDEN_SIZE = _HEADS * _HEAD_DIM
_LEAST_LAYERS = 2

# The first pattern that the whole name matches gives the size; `(.*_)?` stands before all of them. Numbers of key heads
# are handled apart, because whether heads share keys is part of an architecture.
_SIZES: tuple[tuple[int, str], ...] = (
    (VOCAB_SIZE, "vocab_size|vocab_size_per_layer_input|vocab_size_base"),
    (8, "hidden_size_per_layer_input|laurel_rank|lora_rank|dt_rank|time_step_rank|gated_norm_rank"),
    (8, "qk_rope_head_dim|qk_nope_head_dim|index_head_dim|d_state|state_size"),
    (_HEAD_DIM, "head_dim|headdim|d_kv|d_head|dim_head|kv_channels|attention_head_size|query_pre_attn_scalar"),
    (_HEAD_DIM // 2, "rotary_dim"),
    (2 * _HEADS, "mamba_n_heads|mamba_num_heads|n_mamba_heads"),
    (2 * _HIDDEN_SIZE, "mamba_d_ssm"),
    (_HIDDEN_SIZE, "hidden_size|hidden_dim|d_model|n_embd|emb_dim|embed_dim|embedding_dim"),
    (_HIDDEN_SIZE, "word_embed_proj_dim|embedding_size"),
    (_HIDDEN_SIZE, "lru_width|hidden_size_global|adapter_in_dim|adapter_out_dim|adapter_input_size"),
    (32, "intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|d_ff|dff|dim_ff|n_inner|d_inner|feed_forward_size"),
    (1, "expert_groups?|n_groups?|ngroups|topk_groups?"),
    (2, "experts_per_tok(en)?|top_?k(_experts)?|moe_k|num_selected_experts"),
    (4, "num_(local_)?experts|n_routed_experts|zero_expert_num"),
    (_HEADS, "num_(attention_|linear_)?heads|n_heads?|attention_heads|num_key_heads|num_value_heads"),
    (SLIDING_WINDOW, "sliding_window(_size)?|attention_window(_size)?|window_size|local_attention"),
    (SLIDING_WINDOW, "attention_chunk_size|index_topk|floor_scale"),
    (MAX_POSITIONS, "max_(position_embeddings|seq_len|target_positions|source_positions)|n_positions|n_ctx"),
    (1, "first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index"),
    (2, "sliding_window_pattern|layer_period|full_attention_interval|no_rope_layer_interval"),
    (1, "attn_layer_offset|expert_layer_offset"),
)
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "kv_n_heads")
_LAYERS = re.compile(
    r"(num|n)_(hidden_|encoder_|decoder_)?(layers?|blocks)|(encoder|decoder)_layers|encoder_attention_layers|depth"
)
_TOKEN_ID = re.compile(r".*token_id|.*token_index")

_LAYER_INDICES = re.compile(
    r"mlp_only_layers|moe_layers|full_attn_idxs|.*layer_ids|attn_layer_indices|cross_attention_layers"
)
_FILLED = {"head_dim": _HEAD_DIM, "num_key_value_heads": _HEADS}  # None: derived from others, to the same values

_Values = dict[str, Any]


def config_of_type(model_type: str) -> PretrainedConfig:
    """The configuration of a model type of transformers, of the size of its first checkpoint. Raises ModelError."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"transformers knows no model type {model_type!r}")
    try:
        return CONFIG_MAPPING[model_type](**_OF_CHECKPOINTS.get(model_type, {}))
    except Exception as error:
        problem = " ".join(str(error).split())
        raise ModelError(f"model type {model_type!r} has no default configuration: {problem}") from error


def tiny_config(config: PretrainedConfig) -> PretrainedConfig:
    """A configuration of the same class whose model fits in a few megabytes. Every kind of layer that the given one
    lists is kept once at least."""
    values = config.to_dict()
    values.pop("quantization_config", None)  # weights are made, not read
    return type(config).from_dict(_shrunk(values))


def _shrunk(values: Mapping[str, Any]) -> _Values:
    """The fields of a configuration or a part of it."""
    layers = next((count for name, count in values.items() if _LAYERS.fullmatch(name) and _is_size(count)), 0)
    kept = _kept_layers(values, layers)
    tiny = {name: _shrunk_value(name, value, values, kept, layers) for name, value in values.items()}
    if values.get("head_dim") and values.get("head_dim") == values.get("qk_rope_head_dim"):
        tiny["head_dim"] = tiny["qk_rope_head_dim"]
    return _merged(tiny, _OVERRIDES.get(str(values.get("model_type")), {}))


def _shrunk_value(name: str, value: Any, values: Mapping[str, Any], kept: list[int], layers: int) -> Any:
    """values: all of the configuration; kept: the layers that are left of `layers`."""
    if isinstance(value, dict):
        if name == "per_layer_config":
            return {
                str(kept.index(int(layer))): _one_layer(part) for layer, part in value.items() if int(layer) in kept
            }
        if name == "rope_parameters":
            return _shrunk_rope(value)
        return _shrunk(value) if "model_type" in value or name.endswith("_config") else value
    if isinstance(value, list):
        if _LAYER_INDICES.fullmatch(name):
            return [kept.index(layer) for layer in value if layer in kept]
        if layers > 1 and len(value) == layers:
            return [_size(name, value[layer]) for layer in kept]
        return value
    if value is None:
        return _FILLED.get(name)
    if _LAYERS.fullmatch(name) and _is_size(value):
        return len(kept)
    if name == "num_kv_shared_layers":
        return sum(layer >= _first_sharing(values, layers) for layer in kept)
    if name in _KEY_HEADS and _is_size(value):
        return _key_heads(value, values)
    return _size(name, value)


def _size(name: str, value: Any) -> Any:
    if not _is_size(value):
        return value
    if _TOKEN_ID.fullmatch(name):
        return value % VOCAB_SIZE
    return next((size for size, pattern in _SIZES if re.fullmatch(f"(.*_)?({pattern})", name)), value)


def _one_layer(values: Mapping[str, Any]) -> _Values:
    """What one layer has otherwise than most."""
    return {
        name: 2 * _HEAD_DIM if name == "head_dim" else _HEADS if name in _KEY_HEADS else _size(name, value)
        for name, value in values.items()
    }


def _merged(values: _Values, others: Mapping[str, Any]) -> _Values:
    merged = dict(values)
    for name, value in others.items():
        is_part = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if is_part else value
    return merged


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _kept_layers(values: Mapping[str, Any], layers: int) -> list[int]:
    """Indices of the first layer of each kind, and of others until there are enough."""
    if layers <= 1:
        return list(range(layers))
    lists = [
        value
        for name, value in values.items()
        if isinstance(value, list) and len(value) == layers and not _LAYER_INDICES.fullmatch(name)
    ]
    shared = _first_sharing(values, layers)
    kinds = [
        (layer >= shared, str([value[layer] for value in lists if not isinstance(value[layer], float)]))
        for layer in range(layers)
    ]
    first = {kind: layer for layer, kind in reversed(list(enumerate(kinds)))}
    kept = set(first.values())
    rest = [layer for layer in range(layers) if layer not in kept]
    return sorted([*kept, *rest[: max(0, _LEAST_LAYERS - len(kept))]])


def _first_sharing(values: Mapping[str, Any], layers: int) -> int:
    """The first of the layers that take keys and values from layers before them; `layers` if none does."""
    return layers - (values.get("num_kv_shared_layers") or 0)


def _key_heads(count: int, values: Mapping[str, Any]) -> int:
    heads = next((values[name] for name in ("num_attention_heads", "n_head", "n_heads") if values.get(name)), count)
    return _HEADS if count == heads else 1 if count == 1 else _HEADS // 2


def _shrunk_rope(rope: Mapping[str, Any]) -> _Values:
    """rope: parameters, of all layers or by type of layer."""
    tiny: _Values = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            tiny[name] = _shrunk_rope(value)
        elif name in ("short_factor", "long_factor"):
            tiny[name] = value[: _HEAD_DIM // 2]
        elif name == "original_max_position_embeddings":
            tiny[name] = MAX_POSITIONS
        elif name == "mrope_section":
            tiny[name] = [_HEAD_DIM // 2 - 2 * (_HEAD_DIM // 8), _HEAD_DIM // 8, _HEAD_DIM // 8]
        else:
            tiny[name] = value
    return tiny


# Sizes that names do not tell, by model type of a configuration or of a part of one.
_OVERRIDES: dict[str, _Values] = {
    "blt": {"encoder_hash_byte_group_vocab": VOCAB_SIZE},
    "longt5": {"local_radius": 3, "global_block_size": 4},
    "mamba2": {"num_heads": 2 * _HEADS},
    "pegasus_x": {"block_size": 8},
    "reformer": {"axial_pos_embds_dim": [_HIDDEN_SIZE // 2] * 2, "axial_pos_shape": [8, MAX_POSITIONS // 8]},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 2 * _HIDDEN_SIZE,
        "attention_head_dim": 2 * _HEAD_DIM,
    },
    "zamba2": {"attention_hidden_size": 2 * _HIDDEN_SIZE, "attention_head_dim": 2 * _HEAD_DIM},
    "zaya": {"num_experts_per_tok": 1},
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_QWEN4_INDEXER = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
_MIXED: _Values = {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}
_QWEN: _Values = {**_MIXED, "use_sliding_window": True, "sliding_window": 4096}
# What checkpoints of a model type have and its default configuration lacks.
_OF_CHECKPOINTS: dict[str, _Values] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {**_MIXED, "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0, "kv_n_heads": 8}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {**_MIXED, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "laguna": _MIXED,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "mellum": _MIXED,
    "minimax_m3_vl_text": {"num_hidden_layers": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    "ministral": _MIXED,
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 4096},
    "qwen4_exp": {"text_config": _QWEN4_INDEXER},
    "qwen4_exp_text": _QWEN4_INDEXER,
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}  # fmt: skip
