"""The attention function of all models: writes keys and values into the paged cache and attends for each sequence.

Registered with transformers' `AttentionInterface`, so models are not patched. The plan of a forward is passed as the
keyword argument `paged_plan` through the model's own `**kwargs`. No mask function is registered under the name, so
models build no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from actors.engine.attention.latent import latent_projection
from actors.engine.kv_cache import KvCache
from actors.errors import ModelError

ATTENTION_NAME = "paceline_paged"

# Unsupported arguments that change attention: biases, masks of heads, chosen keys, sinks under other names than
# transformers'.
_NOT_COMPUTED = ("sinks", "position_bias", "alibi", "head_mask", "block_mask", "indices")


@dataclass(frozen=True, slots=True)
class Scoring:
    """A layer's parameters of the attention weights."""

    scale: float
    # Positions a row sees, itself included; None: all. -n: those before it in its own chunk of n positions, and itself
    sliding_window: int | None
    softcap: float | None  # limits scores to (-softcap, softcap); None: no limit
    # [heads]: a logit of each head that takes its share of the softmax and adds no value; None: none
    sinks: torch.Tensor | None = None


class PlanLost(ModelError):
    """A layer has not passed the plan of its forward on."""


class AttentionPlan(Protocol):
    """How the rows of one forward attend."""

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Write the rows' keys and values, [rows, kv_heads, dim], into the layer's cache and attend.

        query [rows, heads, head_dim] -> [rows, heads, value_dim]. Rows of padding may have any finite result.
        """
        ...


def write_slots(
    kv: KvCache, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's keys and values, [num_slots + 1, kv_heads, dim] each, after those of the rows are written.

    slots: int64 [rows].
    """
    pool_keys, pool_values = kv.layer(layer)
    pool_keys.index_copy_(0, slots, _finite(keys))
    if not kv.shares_values(layer):
        pool_values.index_copy_(0, slots, _finite(values))
    return pool_keys, pool_values


def _finite(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    paged_plan: AttentionPlan | None = None,
    sliding_window: int | None = None,
    row_positions: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim] -> [1, rows, heads, head_dim].

    row_positions: int64 [1, rows], for modules whose queries are scaled by position. Of a module whose latents are
    cached, key and value are the latents.
    """
    # Ignoring an unsupported argument would silently change the output.
    unknown = [name for name in _NOT_COMPUTED if kwargs.get(name) is not None]
    if attention_mask is not None or unknown:
        raise ModelError(
            f"{type(module).__name__} attends with {', '.join(unknown) or 'a mask of its own'}; "
            "causal attention with sliding windows, chunks, soft caps and sinks is computed"
        )
    if paged_plan is None:
        raise PlanLost(f"{type(module).__name__} is not given the arguments of the model's forward")
    if not getattr(module, "is_causal", True):
        raise ModelError(f"{type(module).__name__} attends to later tokens, too; causal attention is computed")
    scale = float(query.shape[-1]) ** -0.5 if scaling is None else scaling
    if sliding_window is None:
        sliding_window = getattr(module, "window_of_mask", None)
    scoring = Scoring(scale, sliding_window, softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"))
    if hasattr(module, "scale_of_position"):
        query = (query * module.scale_of_position(row_positions)[:, None, :, None]).to(query.dtype)
    rows, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    latent = latent_projection(module)
    if latent is not None:
        rows = latent.absorb_query(rows)
    attended = paged_plan.attend(module.layer_idx, rows, keys, values, scoring)
    if latent is not None:
        attended = latent.expand_values(attended)
    return attended.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
