"""Finds the decoder layers of a model of any architecture."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from actors.errors import ModelError


def num_decoder_layers(model: PreTrainedModel) -> int:
    """Raises ModelError for a model that has no such number."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(count, int):
        raise ModelError(f"the configuration of {type(model).__name__} has no num_hidden_layers")
    return count


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The first list of modules that is as long as the model has layers. Raises ModelError."""
    count = num_decoder_layers(model)
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(f"{type(model).__name__} has no list of its {count} decoder layers")
