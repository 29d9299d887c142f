"""How models are shared out over ranks where `transformers` has no tensor-parallel plan, or one for experts alone.

Recurrent mixers are no part of these plans: see `mixer_shares`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actors.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Plan = Mapping[str, str]


def _sides(path: str, divided: tuple[str, ...], summed: str) -> Plan:
    """Linears below a path: those with a share of the outputs on each rank, and the one that takes these in."""
    return {**{f"{path}.{name}": "colwise" for name in divided}, f"{path}.{summed}": "rowwise"}


_QUERIES_KEYS_VALUES = ("q_proj", "k_proj", "v_proj")
_ATTENTION = _sides("layers.*.self_attn", _QUERIES_KEYS_VALUES, "o_proj")
_LFM2_ATTENTION = _sides("layers.*.self_attn", _QUERIES_KEYS_VALUES, "out_proj")
_LFM2_MLP = _sides("layers.*.feed_forward", ("w1", "w3"), "w2")
_LLAMA_MLP = _sides("layers.*.feed_forward", ("gate_proj", "up_proj"), "down_proj")

# Added to the plans of transformers.
# gpt-oss: experts are split along their inner width. Gate and up columns alternate, so a rank's columns are pairs. The
# weights of experts are [experts, inputs, outputs], transposed to those of a linear: "rowwise" is what splits their
# last dimension, and "colwise" the one before.
_PLANS: Mapping[str, Plan] = {
    "gpt_oss": {
        **_ATTENTION,
        "layers.*.self_attn": "local_params",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.mlp.experts.gate_up_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
    "lfm2": {**_LFM2_ATTENTION, **_LFM2_MLP},
    "lfm2_moe": {**_LFM2_ATTENTION, **_LFM2_MLP},
    "lfm3": {**_sides("layers.*.self_attn", (*_QUERIES_KEYS_VALUES, "g_proj"), "o_proj"), **_LFM2_MLP},
    "bamba": {**_ATTENTION, **_LLAMA_MLP},
    "falcon_h1": {**_ATTENTION, **_LLAMA_MLP},
    "jamba": {**_ATTENTION, **_LLAMA_MLP},
    "granitemoehybrid": {
        **_ATTENTION,
        "layers.*.shared_mlp.input_linear": "packed_colwise",
        "layers.*.shared_mlp.output_linear": "rowwise",
    },
    "nemotron_h": {
        **_sides("layers.*.mixer", _QUERIES_KEYS_VALUES, "o_proj"),
        **_sides("layers.*.mixer", ("up_proj",), "down_proj"),
        **_sides("layers.*.mixer.shared_experts", ("up_proj",), "down_proj"),
    },
}
_ADDED_ONCE = ("mlp.experts.down_proj_bias",)  # added by each rank before the sum over ranks
# Widths that ranks must divide: DTensor shares out others unevenly, which halves side by side do not allow.
_WIDTHS = {"gpt_oss": "intermediate_size", "granitemoehybrid": "shared_intermediate_size"}


def plan_of(text: PretrainedConfig) -> Plan:
    """text: the configuration of the text model. Empty: the model runs on one rank."""
    return {**(getattr(text, "base_model_tp_plan", None) or {}), **_PLANS.get(text.model_type, {})}


def check_own_plan(spec: str, text: PretrainedConfig, stored: dict[str, Any] | None, ranks: int) -> None:
    """stored: see `stored_quantization`. Raises ModelError for a model that our plans cannot shard."""
    method = None if stored is None else stored.get("quant_method")
    if text.model_type == "gpt_oss" and method not in (None, "mxfp4"):
        raise ModelError(
            f"model {spec!r}: weights of {text.model_type} in {method} are not shared out; tensor_parallel must be 1"
        )
    width = getattr(text, _WIDTHS.get(text.model_type, ""), 0)
    if width % ranks:
        limit = f"it must divide the width {width} of the experts of model {spec!r}"
        raise ModelError(f"tensor_parallel is {ranks}; {limit}")


def with_own_plan(config: PretrainedConfig, *, divides_mixers: bool) -> PretrainedConfig:
    """The configuration with the whole plan. divides_mixers: recurrent mixers are loaded whole, to be divided later."""
    text = config.get_text_config()
    plan = plan_of(text)
    text.base_model_tp_plan = {
        path: style for path, style in plan.items() if not (divides_mixers and ".linear_attn." in path)
    }
    return config


def add_biases_once(model: PreTrainedModel, rank: int) -> None:
    """Clear, on all ranks but the first, biases that every rank adds to its part of a sum."""
    if rank == 0 or model.config.get_text_config().model_type not in _PLANS:
        return
    for name, parameter in model.named_parameters():
        if name.endswith(_ADDED_ONCE):
            parameter.data.zero_()
