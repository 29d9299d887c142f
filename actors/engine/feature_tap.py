"""Captures hidden states of the target for the head that drafts from them."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from actors.engine.decoder_layers import decoder_layers

Kept = dict[int, tuple[torch.Tensor, ...]]  # by layer (-1: the last output), one tensor per forward


class FeatureTap:
    """Captures the inputs of some decoder layers, the output of the last one, or the normed output, through hooks.

    Only forwards between `open` and `close` or `take` are captured.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequences[int] | None) -> None:
        """layers: their inputs are concatenated in this order, where the number of layers stands for the output of the
        last one; None: the input of the output layer."""
        self.is_open = False
        self.kept: Kept = {}  # since `open`
        self._order: tuple[int, ...] = (-1,) if layers is None else tuple(layers)
        if layers is None:
            model.base_model.register_forward_hook(self._keep_output)
            return
        modules = decoder_layers(model)
        for layer in sorted(set(layers)):
            if layer == len(modules):
                modules[-1].register_forward_hook(self._output_keeper(layer))
            else:
                modules[layer].register_forward_pre_hook(self._input_keeper(layer), with_kwargs=True)

    def open(self) -> None:
        self.kept = {}
        self.is_open = True

    def close(self) -> list[tuple[torch.Tensor, ...]]:
        """What was captured since `open`: for each layer, rows of each forward, [rows, h]."""
        kept = self.kept
        self.drop()
        return [kept[layer] for layer in self._order]

    def drop(self) -> None:
        """Close, and forget what was captured."""
        self.kept = {}
        self.is_open = False

    def take(self, num_rows: int) -> torch.Tensor:
        """Features of the first `num_rows` rows computed since `open`, [num_rows, size]."""
        return torch.cat([torch.cat(of_layer)[:num_rows] for of_layer in self.close()], dim=-1)

    def _keep(self, layer: int, hidden: torch.Tensor) -> None:
        if self.is_open:
            self.kept[layer] = (*self.kept.get(layer, ()), hidden.reshape(-1, hidden.shape[-1]))

    def _keep_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self._keep(-1, output[0])

    def _input_keeper(self, layer: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(layer, args[0] if args else kwargs["hidden_states"])

        return keep

    def _output_keeper(self, layer: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._keep(layer, output if isinstance(output, torch.Tensor) else output[0])

        return keep
