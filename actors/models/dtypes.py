"""The type of numbers that a model computes in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.options import Dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HALVES: dict[str, Dtype] = {"torch.bfloat16": "bfloat16", "torch.float16": "float16"}


def choose_dtype(asked: Dtype, config: PretrainedConfig, device: str) -> Dtype:
    """What `auto` means for a model on a device; anything else that is asked for stays.

    float32 on a CPU. On others the checkpoint's own if it has 16 bits, else bfloat16.
    """
    if asked != "auto":
        return asked
    if device == "cpu":
        return "float32"
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return _HALVES.get(str(stored), "bfloat16")
