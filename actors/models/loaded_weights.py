"""Refuses checkpoints that do not have the weights of their model: `transformers` only warns, and makes them up."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from actors.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN = 3  # names in a message
_OLD_BUFFERS = re.compile(r"\.(masked_bias|inv_freq)$")  # that checkpoints of years ago have


def check_loaded(model: PreTrainedModel, info: Mapping[str, Any], *, is_quantized: bool = False) -> None:
    """Raises ModelError for weights that the checkpoint lacks, and for ones in the model's own layers that the model
    does not have. More layers, and other parts such as vision towers, may be left out.

    info: as `from_pretrained` returns it, without tied weights and those that the model's class ignores. is_quantized:
    the checkpoint is; its layers may have scales of more than their weights.
    """
    problems = {
        "lacks": info["missing_keys"],
        "has other shapes of": [name for name, *_ in info["mismatched_keys"]],
        "has, and its model has not,": [] if is_quantized else _unknown(model, info["unexpected_keys"]),
    }
    told = [f"{what} {_listed(names)}" for what, names in problems.items() if names]
    if told:
        raise ModelError(f"its checkpoint {'; it '.join(told)}")


def _unknown(model: PreTrainedModel, unexpected: Collection[str]) -> list[str]:
    """Those that belong to a layer that the model has, or to another module with weights of its own."""
    from torch import nn

    parts = dict(model.named_modules())
    buffers = {name for name, _ in model.named_buffers()}
    layers = {
        f"{name}.{index}"
        for name, part in parts.items()
        if isinstance(part, nn.ModuleList)
        for index in range(len(part))
    }
    found = []
    for key in unexpected:
        parents = [key[: dot.start()] for dot in re.finditer(r"\.", key)]
        owner = parts.get(parents[-1]) if parents else None
        is_ours = not layers.isdisjoint(parents) or (
            owner is not None and next(owner.parameters(recurse=False), None) is not None
        )
        if is_ours and key not in buffers and not _OLD_BUFFERS.search(key):
            found.append(key)
    return found


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
