"""Finds the shapes of a model's keys and values by a forward of one row."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from actors.engine.attention.interface import Scoring
from actors.engine.attention.latent import latent_projection
from actors.engine.kv_cache import LayerShape
from actors.errors import ModelError


class ShapeProbe:
    """An `AttentionPlan` that attends to nothing and remembers what it was given."""

    def __init__(self) -> None:
        self._shapes: dict[int, LayerShape] = {}

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        _, kv_heads, key_dim = keys.shape
        self._shapes[layer] = LayerShape(kv_heads, key_dim, values.shape[-1], keys.dtype)
        return query.new_zeros((*query.shape[:-1], values.shape[-1]))

    def shapes(self, num_layers: int, name: str) -> list[LayerShape]:
        """Of layers 0 .. num_layers - 1. Raises ModelError, with the model's name, if some have not attended."""
        if sorted(self._shapes) != list(range(num_layers)):
            raise ModelError(
                f"{len(self._shapes)} of {num_layers} layers of {name} attend through transformers' attention "
                "interface; all must"
            )
        return [self._shapes[layer] for layer in range(num_layers)]


@torch.inference_mode()
def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """Of all attention layers. With tensor parallelism all ranks call this at once. Raises ModelError for a model with
    attention that goes another way."""
    probe = ShapeProbe()
    device = next(model.parameters()).device
    row = torch.zeros((1, 1), dtype=torch.int64, device=device)
    model(input_ids=row, position_ids=row, use_cache=False, paged_plan=probe)
    shapes = probe.shapes(int(model.config.get_text_config().num_hidden_layers), type(model).__name__)
    for module in model.modules():
        if latent_projection(module) is not None:
            shapes[module.layer_idx] = shapes[module.layer_idx]._replace(shares_values=True)
    return shapes
