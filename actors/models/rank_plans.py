"""How models are shared out over ranks for which `transformers` has no tensor-parallel plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from actors.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Plan = Mapping[str, str]

# Experts are split along their inner width. Gate and up columns alternate, so a rank's columns are pairs. The weights
# of experts are [experts, inputs, outputs], transposed to those of a linear: "rowwise" is what splits their last
# dimension, and "colwise" the one before.
_PLANS: Mapping[str, Plan] = {
    "gpt_oss": {
        "layers.*.self_attn": "local_params",
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
}
_ADDED_ONCE = ("mlp.experts.down_proj_bias",)  # added by each rank before the sum over ranks


def plan_of(text: PretrainedConfig) -> Plan | None:
    """text: the configuration of the text model."""
    plan: Plan | None = getattr(text, "base_model_tp_plan", None) or _PLANS.get(text.model_type)
    return plan


def check_own_plan(spec: str, text: PretrainedConfig, stored: dict[str, Any] | None, ranks: int) -> None:
    """stored: see `stored_quantization`. Raises ModelError for what a plan of ours cannot share out."""
    if text.model_type not in _PLANS:
        return
    if stored is not None:
        raise ModelError(
            f"model {spec!r}: quantized weights of {text.model_type} are not shared out; tensor_parallel must be 1"
        )
    if text.intermediate_size % ranks:
        limit = f"it must divide the width {text.intermediate_size} of the experts of model {spec!r}"
        raise ModelError(f"tensor_parallel is {ranks}; {limit}")


def with_own_plan(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration, to which a plan of ours is added if there is one."""
    text = config.get_text_config()
    if text.model_type in _PLANS:
        text.base_model_tp_plan = dict(_PLANS[text.model_type])
    return config


def add_biases_once(model: PreTrainedModel, rank: int) -> None:
    """Clear, on all ranks but the first, biases that every rank adds to its part of a sum."""
    if rank == 0 or model.config.get_text_config().model_type not in _PLANS:
        return
    for name, parameter in model.named_parameters():
        if name.endswith(_ADDED_ONCE):
            parameter.data.zero_()
