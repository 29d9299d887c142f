"""Types of decoder layers as configurations of transformers name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding")  # the hybrid ones also attend
# Layers without keys and values that occur in models with recurrent and attention layers
WITHOUT_KEYS = ("linear_attention", "conv", "mlp", "moe")


def layer_types(config: PretrainedConfig) -> list[str]:
    """The type of each layer; empty: the configuration does not say, and all attend."""
    return list(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())


def has_recurrent_state(config: PretrainedConfig) -> bool:
    return not set(RECURRENT).isdisjoint(layer_types(config))
