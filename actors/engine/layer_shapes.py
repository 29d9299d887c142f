"""Finds the shapes of a model's keys and values by a forward of one row."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from actors.engine.attention.carried_plan import carry_plans
from actors.engine.attention.interface import ATTENTION_NAME, PlanLost, Scoring
from actors.engine.attention.latent import cache_latents, latent_projection
from actors.engine.attention.own_attention import replace_own_attention
from actors.engine.decoder_layers import decoder_layers, num_decoder_layers
from actors.engine.kv_cache import LayerShape
from actors.errors import ModelError
from actors.models.layer_types import WITHOUT_KEYS, layer_types


class ShapeProbe:
    """An `AttentionPlan` that attends to nothing and remembers what it was given."""

    def __init__(self) -> None:
        self._shapes: dict[int, LayerShape] = {}
        self.windowed: set[int] = set()  # layers that are given a sliding window

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        if layer in self._shapes:
            raise ModelError(f"layer {layer} attends more than once; each must have keys and values of its own")
        _, kv_heads, key_dim = keys.shape
        self._shapes[layer] = LayerShape(kv_heads, key_dim, values.shape[-1], keys.dtype)
        if scoring.sliding_window is not None:
            self.windowed.add(layer)
        return query.new_zeros((*query.shape[:-1], values.shape[-1]))

    def shapes(self, num_layers: int, name: str, without_keys: Set[int]) -> list[LayerShape]:
        """Shapes of layers 0 .. num_layers - 1. without_keys: those that do not attend. Raises ModelError, with the
        model's name, if other layers have attended than must."""
        attending = [layer for layer in range(num_layers) if layer not in without_keys]
        if sorted(self._shapes) != attending or not attending:
            raise ModelError(
                f"{len(self._shapes)} of {len(attending)} layers of {name} attend through transformers' attention "
                "interface; all must"
            )
        none = LayerShape.without_keys(self._shapes[attending[0]].dtype)
        return [self._shapes.get(layer, none) for layer in range(num_layers)]


def _give_windows(model: PreTrainedModel, windowed: Set[int]) -> None:
    """Tell the layers whose sliding window (Qwen2-MoE) or chunk (Llama 4) is only in transformers' masks, which are not
    made here."""
    config = model.config.get_text_config()
    windows = {}
    for layer, kind in enumerate(layer_types(config)):
        if kind == "sliding_attention" and layer not in windowed:
            windows[layer] = config.sliding_window
        elif kind == "chunked_attention":
            windows[layer] = -config.attention_chunk_size
    for module in model.base_model.modules():
        if getattr(module, "layer_idx", None) in windows:
            module.window_of_mask = windows[module.layer_idx]


@dataclass(frozen=True)
class _ScaleOfPosition:
    """Factors of queries that grow with the position (Llama 4)."""

    floor_scale: float
    attn_scale: float

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 -> float32 of the same shape."""
        return torch.log1p(torch.floor((positions.float() + 1.0) / self.floor_scale)) * self.attn_scale + 1.0


def _scale_by_position(model: PreTrainedModel) -> None:
    """Let the attention function scale queries: Llama 4 takes a row's place in a forward for its position."""
    scaled = [
        module
        for module in model.base_model.modules()
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    ]
    for module in scaled:
        module.attn_temperature_tuning = False
        module.scale_of_position = _ScaleOfPosition(module.floor_scale, module.attn_scale)
        decoder_layers(model)[module.layer_idx].register_forward_pre_hook(_pass_positions, with_kwargs=True)


def _pass_positions(
    layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "row_positions": kwargs["position_ids"]}


def _probe(model: PreTrainedModel) -> ShapeProbe:
    """Raises ModelError for any error of the model's forward with the arguments of a packed batch."""
    probe = ShapeProbe()
    row = torch.zeros((1, 1), dtype=torch.int64, device=next(model.parameters()).device)
    try:
        model(input_ids=row, position_ids=row, use_cache=False, paged_plan=probe)
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        problem = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{type(model).__name__} does not compute packed rows: {type(error).__name__}: {problem}"
        ) from error
    return probe


@torch.inference_mode()
def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """Lets a model attend through the paged cache, in place, and returns the shapes of all its layers there.

    Doing so again changes nothing. With tensor parallelism all ranks call this at once. Raises ModelError for a model
    with attention that goes another way.
    """
    model.set_attn_implementation(ATTENTION_NAME)
    replace_own_attention(model)
    cache_latents(model)
    try:
        probe = _probe(model)
    except PlanLost:
        carry_plans(model)
        probe = _probe(model)
    without_keys = {layer for layer, kind in enumerate(layer_types(model.config)) if kind in WITHOUT_KEYS}
    shapes = probe.shapes(num_decoder_layers(model), type(model).__name__, without_keys)
    _give_windows(model, probe.windowed)
    _scale_by_position(model)
    for module in model.modules():
        if latent_projection(module) is not None:
            shapes[module.layer_idx] = shapes[module.layer_idx]._replace(shares_values=True)
    return shapes
