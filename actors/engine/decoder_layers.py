"""Finds the decoder layers of a model of any architecture."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from actors.errors import ModelError


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The first list of modules that is as long as the model has layers. Raises ModelError."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ModelError(f"{type(model).__name__} has no list of its {count} decoder layers")
