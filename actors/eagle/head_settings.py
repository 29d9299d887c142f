"""Which values of a published head's config.json are read.

A key or value that is not known here may change what a head computes, so it is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from transformers import LlamaConfig

from actors.errors import ModelError

HeadKind = Literal["eagle", "eagle3"]

# Keys that do not change what a head computes, or that its tensors say better.
_DESCRIPTIVE = {
    "attention_bias", "auto_map", "bias", "has_no_defaults_at_init", "max_window_layers", "qkv_bias",
    "target_model_type", "torch_dtype",
}  # fmt: skip
# Keys of a target with experts, copied into the head's config.json. They do not describe the head: a head with experts
# would have other tensors.
_EXPERTS = {
    "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts",
    "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "shared_expert_intermediate_size",
}  # fmt: skip
# Keys that describe the whole head; not allowed in `transformer_layer_config`.
_HEAD = {
    "draft_vocab_size", "embed_requires_grad", "enable_sp_ulysses", "speculators_config", "speculators_model_type",
    "speculators_version", "transformer_layer_config",
}  # fmt: skip
# Keys that describe the head's layers; not allowed beside `transformer_layer_config`.
_SHAPE = {
    "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "mlp_bias",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "vocab_size",
}  # fmt: skip
# Older versions of transformers wrote parameters of `generate` and of its outputs into config.json.
_GENERATION = {
    "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "is_decoder", "length_penalty", "max_length", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "prefix",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
    "torchscript", "typical_p", "use_bfloat16",
}  # fmt: skip
_NONE_IF_FALSE = {"add_cross_attention", "parallel_drafting", "pruned_heads", "use_mrope", "use_sliding_window"}
# All supported heads have Llama layers. The other model types have the same layer and defaults if their tensors are
# those of a Llama; the architectures differ only in name.
_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3", "speculator_model"}
_ARCHITECTURES = {
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "EagleLlamaForCausalLM",
    "LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", "Eagle3DraftModel", "Eagle3LLamaforCausalLM",
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM", "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "Eagle3Speculator",
    "LlamaForCausalLMEagle3",
}  # fmt: skip
_SPECULATORS: dict[HeadKind, set[str]] = {"eagle": set(), "eagle3": {"eagle3"}}
# Keys of P-EAGLE heads: the kind of head, and how it was trained.
MASK_TOKENS = ("ptd_token_id", "pard_token", "mask_token_id")
_PARALLEL = {*MASK_TOKENS, "parallel_drafting", "num_depths", "down_sample_ratio", "down_sample_ratio_min"}
_PARALLEL_ARCHITECTURES = {
    "PEagleDraftModel", "PEagleLlamaForCausalLM", "PEagleSpeculator", "PeagleLlamaForCausalLM",
}  # fmt: skip
# For text, positions are equal in all mrope sections of a multimodal target, so mrope keys have no effect.
_ROPE = {
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor", "low_freq_factor",
    "mrope_interleaved", "mrope_section", "mscale", "mscale_all_dim", "original_max_position_embeddings", "rope_theta",
    "rope_type", "short_factor", "truncate", "type",
}  # fmt: skip


class Flags(msgspec.Struct):
    """Settings of EAGLE-3, in config.json or in its `eagle_config`."""

    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    use_aux_hidden_state: bool | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None


class _EagleConfig(Flags):
    """Settings that ModelOpt (NVIDIA) writes in addition to the flags."""

    use_input_layernorm_in_first_layer: bool | None = None
    use_last_layernorm: bool | None = None
    use_mtp_layernorm: bool | None = None
    next_layer_regular: bool | None = None
    parallel_draft_step: int | None = None
    parallel_draft_heads_num_layers: int | None = None  # describes heads with several parallel draft steps; ignored


# The values for the published EAGLE-3 architecture.
_PLAIN = _EagleConfig(
    use_input_layernorm_in_first_layer=True,
    use_last_layernorm=True,
    use_mtp_layernorm=False,
    next_layer_regular=True,
    parallel_draft_step=1,
)


class _Layer(Flags):
    """Types of the values that are read here; transformers checks the layer's shape."""

    architectures: list[str] | None = None
    model_type: str | None = None
    layer_types: list[str] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


class _Speculators(msgspec.Struct):
    algorithm: str | None = None


class HeadSettings(_Layer):
    """Types of the values that are read from config.json, except the layer's shape."""

    draft_vocab_size: Annotated[int, msgspec.Meta(gt=0)] | None = None
    speculators_model_type: str | None = None
    speculators_config: _Speculators | None = None
    transformer_layer_config: _Layer | None = None
    eagle_config: _EagleConfig | None = None


def read_settings(file: Path, data: Mapping[str, Any]) -> HeadSettings:
    """What config.json says, with the flags of its `eagle_config`. Raises ModelError for a value of another type, and
    where both places have a flag and differ."""
    try:
        settings = msgspec.convert(data, HeadSettings)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: {error}") from None
    for name in Flags.__struct_fields__ if settings.eagle_config is not None else ():
        value, nested = getattr(settings, name), getattr(settings.eagle_config, name)
        if value not in (None, [], nested) and nested not in (None, []):
            raise ModelError(f"{file}: {name} is {value!r}, and eagle_config.{name} is {nested!r}")
        setattr(settings, name, value if nested in (None, []) else nested)
    return settings


def check_settings(
    file: Path, kind: HeadKind, data: Mapping[str, Any], settings: HeadSettings, is_parallel: bool
) -> None:
    """Raises ModelError for a key or value that may change what the head computes. is_parallel: P-EAGLE."""
    nested: Mapping[str, Any] = data.get("transformer_layer_config") or {}
    layer_keys = set(LlamaConfig().to_dict()) | _SHAPE | _DESCRIPTIVE | _EXPERTS | _GENERATION
    head_keys = layer_keys | _HEAD
    if nested:
        head_keys -= {key for key in _SHAPE if data.get(key) != nested.get(key)}
    if kind == "eagle3":
        head_keys |= {*Flags.__struct_fields__, "eagle_config", "target_hidden_size"}
    elif data.get("use_aux_hidden_state") is False:
        head_keys.add("use_aux_hidden_state")
    if is_parallel:
        head_keys |= _PARALLEL
    for place, values, known in (("", data, head_keys), ("transformer_layer_config.", nested, layer_keys)):
        for key, value in values.items():
            if value is not None and key not in known and not _is_unused(key, values):
                name = "EAGLE-3" if kind == "eagle3" else "EAGLE-1 and -2"
                raise ModelError(
                    f"{file}: {place}{key} is {value!r}, which is not implemented for {name} heads; remove it only if "
                    "it does not change what the head computes"
                )
        for key, value in _not_implemented(values, is_parallel):
            raise ModelError(f"{file}: {place}{key} is {value!r}, which is not implemented for heads")
    for key, value in _not_implemented_in_head(kind, data, settings, is_parallel):
        raise ModelError(f"{file}: {key} is {value!r}, which is not implemented for heads with these tensors")
    if nested and kind == "eagle3" and settings.norm_before_residual is None:
        # speculators itself takes False, vLLM takes True.
        raise ModelError(f"{file}: norm_before_residual is missing, and programs that read this layout differ about it")


def _is_unused(key: str, values: Mapping[str, Any]) -> bool:
    if key == "sliding_window":
        return values.get("use_sliding_window") is False
    return key == "layer_types" or (key in _NONE_IF_FALSE and not values[key])


def _not_implemented(values: Mapping[str, Any], is_parallel: bool) -> Iterator[tuple[str, Any]]:
    """Known keys with values that are not known."""
    if values.get("model_type") not in (None, *_MODEL_TYPES):
        yield "model_type", values["model_type"]
    architectures = _ARCHITECTURES | (_PARALLEL_ARCHITECTURES if is_parallel else set())
    if not set(values.get("architectures") or ()) <= architectures:
        yield "architectures", values["architectures"]
    if not set(values.get("layer_types") or ()) <= {"full_attention"}:
        yield "layer_types", values["layer_types"]
    yield from unknown_rotation(values)


def unknown_rotation(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys of `rope_scaling` and `rope_parameters` that are not known, with their values."""
    for place in ("rope_scaling", "rope_parameters"):
        for key, value in (values.get(place) or {}).items():
            if key not in _ROPE and value is not None and (key, value) != ("partial_rotary_factor", 1):
                yield f"{place}.{key}", value


def _not_implemented_in_head(
    kind: HeadKind, data: Mapping[str, Any], settings: HeadSettings, is_parallel: bool
) -> Iterator[tuple[str, Any]]:
    """As `_not_implemented`, of the values that belong to the whole head."""
    speculators = settings.speculators_config
    names = _SPECULATORS[kind] | ({"peagle"} if is_parallel else set())
    for key, name in (
        ("speculators_model_type", settings.speculators_model_type),
        ("speculators_config.algorithm", speculators.algorithm if speculators is not None else None),
    ):
        if name is not None and name not in names:
            yield key, name
    for key, value in (data.get("eagle_config") or {}).items():
        is_read = key in Flags.__struct_fields__ or key == "parallel_draft_heads_num_layers"
        if value is not None and not is_read and value != getattr(_PLAIN, key, None):
            yield f"eagle_config.{key}", value
    if kind == "eagle3" and settings.use_aux_hidden_state is False:
        yield "use_aux_hidden_state", False
