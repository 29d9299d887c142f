"""Refuses checkpoints that do not have the weights of their model: `transformers` only warns, and makes them up."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from actors.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN = 3  # names in a message
# That checkpoints of years ago have: causal masks, which were a `bias` of the attention itself, and rotations.
_OLD_BUFFERS = re.compile(r"\.((attn|attention)\.bias|masked_bias|causal_mask|inv_freq)$")


def check_loaded(model: PreTrainedModel, info: Mapping[str, Any], *, is_quantized: bool = False) -> None:
    """Raises ModelError for weights that the checkpoint lacks, and for ones in the model's own layers that the model
    does not have. More layers, and other parts such as vision towers, may be left out.

    info: as `from_pretrained` returns it, without tied weights and those that the model's class ignores. is_quantized:
    the checkpoint is; its layers may have scales of more than their weights.
    """
    problems = {
        "lacks": [key for key in info["missing_keys"] if not _is_computed(model, key)],
        "has other shapes of": [name for name, *_ in info["mismatched_keys"]],
        "has, and its model has not,": [] if is_quantized else _unknown(model, info["unexpected_keys"]),
    }
    told = [f"{what} {_listed(names)}" for what, names in problems.items() if names]
    if told:
        raise ModelError(f"its checkpoint {'; it '.join(told)}")


def _is_computed(model: PreTrainedModel, key: str) -> bool:
    """Whether it is a table of positions that `transformers` computes where a checkpoint has none (Pegasus)."""
    return hasattr(model.get_submodule(key.rpartition(".")[0]), "create_weight")


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
    prefix = f"{model.base_model_prefix}."

    def is_ours(key: str) -> bool:
        parents = [key[: dot.start()] for dot in re.finditer(r"\.", key)]
        owner = parts.get(parents[-1]) if parents else None
        has_weights = owner is not None and next(owner.parameters(recurse=False), None) is not None
        return (has_weights or not layers.isdisjoint(parents)) and key not in buffers

    # The checkpoint of a model without its output layer lacks the prefix, also before keys for which there is no place.
    return [key for key in unexpected if not _OLD_BUFFERS.search(key) and any(map(is_ours, (key, f"{prefix}{key}")))]


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
