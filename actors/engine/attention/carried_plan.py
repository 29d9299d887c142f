"""Brings the plan of a forward to attention modules whose layers pass no further arguments on (StableLM, Nemotron)."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from actors.engine.attention.interface import AttentionPlan
from actors.engine.decoder_layers import decoder_layers


class _CarriedPlan:
    """Hooks of one layer: what the layer is given, its attention modules are given."""

    def __init__(self) -> None:
        self._plan: AttentionPlan | None = None

    def take(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._plan = kwargs.get("paged_plan")

    def give(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {"paged_plan": self._plan, **kwargs}

    def drop(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._plan = None


def carry_plans(model: PreTrainedModel) -> None:
    """Hook the plan through the decoder layers of a model, in place. Raises ModelError for a model without a list of
    its layers."""
    for layer in decoder_layers(model):
        plan = _CarriedPlan()
        layer.register_forward_pre_hook(plan.take, with_kwargs=True)
        layer.register_forward_hook(plan.drop, always_call=True)
        for module in layer.modules():
            if hasattr(module, "layer_idx") and module is not layer:
                module.register_forward_pre_hook(plan.give, with_kwargs=True)


def carries_plan(layer: nn.Module) -> bool:
    """Whether a layer has these hooks."""
    return any(isinstance(getattr(hook, "__self__", None), _CarriedPlan) for hook in layer._forward_pre_hooks.values())
