"""The type of numbers that a model computes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from actors.options import Dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HALVES: dict[str, Dtype] = {"torch.bfloat16": "bfloat16", "torch.float16": "float16"}


# (in_features, out_features) of products with weights in bfloat16 -> the dtype in which they are faster on this CPU
FastestDtype = Callable[[int, int], Dtype]


def choose_dtype(
    asked: Dtype, config: PretrainedConfig, device: str, fastest_on_cpu: FastestDtype | None = None
) -> Dtype:
    """What `auto` means for a model on a device; anything else that is asked for stays.

    On a CPU a checkpoint in bfloat16 is computed in the dtype that `fastest_on_cpu` finds, and all others in float32,
    which bfloat16 would round. On other devices the checkpoint's own if it has 16 bits, else bfloat16.
    """
    if asked != "auto":
        return asked
    text = config.get_text_config()
    stored = _HALVES.get(str(getattr(config, "dtype", None) or getattr(text, "dtype", None)))
    if device != "cpu":
        return stored or "bfloat16"
    width = getattr(text, "intermediate_size", None)
    if stored != "bfloat16" or fastest_on_cpu is None or not isinstance(width, int):
        return "float32"
    return fastest_on_cpu(int(text.hidden_size), width)
