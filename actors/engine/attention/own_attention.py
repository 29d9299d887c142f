"""Replaces the attention of older models by ours: they compute it in their own methods, not through transformers'
attention interface.

What such a method does before attention and after it stays: projections, rotation, the output layer. Of models with
ALiBi, whose scores grow with the position of the key, keys get two columns with their position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.engine.attention.interface import AttentionPlan, paged_attention

# Columns that keys with ALiBi have more: two are used, so that the size stays a multiple of what kernels load at once.
POSITION_COLUMNS = 8
_BASE = 256  # positions are stored as two numbers below it, which every dtype holds


class _CurrentForward:
    """What the forward that is being computed was called with."""

    plan: AttentionPlan | None = None
    positions: Tensor | None = None  # int64 [1, rows]

    def take(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.plan, self.positions = kwargs.get("paged_plan"), kwargs.get("position_ids")

    def drop(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.plan = self.positions = None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float, slopes: Tensor | None = None
    ) -> Tensor:
        """Arguments as of `paged_attention`. slopes: [heads], of ALiBi."""
        if slopes is not None:
            assert self.positions is not None
            query, key = _with_positions(query, key, self.positions, slopes / scale)
        return paged_attention(module, query, key, value, None, scale, paged_plan=self.plan)[0]


def _with_positions(query: Tensor, key: Tensor, positions: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Columns for query and key, [1, heads, rows, dim], that add slope * position of the key to their product."""
    asked, own = (tensor.new_zeros((*tensor.shape[:3], POSITION_COLUMNS)) for tensor in (query, key))
    own[..., 0], own[..., 1] = positions // _BASE, positions % _BASE
    asked[..., 0], asked[..., 1] = _BASE * slopes[:, None], slopes[:, None]
    return torch.cat([query, asked], dim=-1), torch.cat([key, own], dim=-1)


def _scaled(module: nn.Module, forward: _CurrentForward, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    """GPT-J, CodeGen and GPT-NeoX Japanese: `_attn`."""
    attended = forward.attend(module, query.to(value.dtype), key.to(value.dtype), value, query.shape[-1] ** -0.5)
    return attended.transpose(1, 2), None


def _gpt_neo(module: nn.Module, forward: _CurrentForward, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    """`_attn`, without a scale."""
    return forward.attend(module, query, key, value, 1.0).transpose(1, 2), None


def _bloom(
    module: Any, forward: _CurrentForward, hidden_states: Tensor, residual: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """`forward`."""
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    query, key, value = module._reshape(module.query_key_value(hidden_states))
    slopes = _get_alibi_slopes(module.num_heads, hidden_states.device)
    attended = forward.attend(module, query, key, value, module.inv_norm_factor, slopes)
    return module.dense(attended.flatten(2)) + residual, None


def _mpt(
    module: Any, forward: _CurrentForward, hidden_states: Tensor, position_bias: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """`forward`. position_bias: [heads, 1, positions]"""
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (part.unflatten(-1, (module.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=2))
    slopes = position_bias[:, 0, -1] - position_bias[:, 0, -2]
    attended = forward.attend(module, query, key, value, module.softmax_scale, slopes)
    return module.out_proj(attended.flatten(2)), None


def _falcon(
    module: Any,
    forward: _CurrentForward,
    hidden_states: Tensor,
    alibi: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`forward`. Key heads that queries share are cached once; with ALiBi, once for each query head."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    query, keys, values = module._split_heads(module.query_key_value(hidden_states))
    if alibi is not None:
        query, key, value = (part.expand_as(query).transpose(1, 2) for part in (query, keys, values))
        assert forward.positions is not None
        query, key = _with_rounded_biases(query, key, forward.positions)
    else:
        assert position_embeddings is not None
        shared = keys.shape[2] // module.num_kv_heads
        query, key, value = (part.transpose(1, 2) for part in (query, keys[:, :, ::shared], values[:, :, ::shared]))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    return module.dense(forward.attend(module, query, key, value, module.inv_norm_factor).flatten(2)), None


def _with_rounded_biases(query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """As `_with_positions`, for Falcon, which rounds slopes, positions and their products to bfloat16: a column of the
    key holds the product."""
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    slopes = build_alibi_tensor(positions.new_ones((1, 2)), query.shape[1], torch.bfloat16)[:, 0, 1]
    asked, own = (tensor.new_zeros((*tensor.shape[:3], POSITION_COLUMNS)) for tensor in (query, key))
    asked[..., 0], own[..., 0] = 1.0, slopes[:, None] * positions
    return torch.cat([query, asked], dim=-1), torch.cat([key, own], dim=-1)


class _Own(NamedTuple):
    """The method of a class of modules that attends, and what it is replaced with."""

    method: str
    attend: Callable[..., Any]


_OWN = {
    "GPTJAttention": _Own("_attn", _scaled),
    "CodeGenAttention": _Own("_attn", _scaled),
    "GPTNeoXJapaneseAttention": _Own("_attn", _scaled),
    "GPTNeoSelfAttention": _Own("_attn", _gpt_neo),
    "BloomAttention": _Own("forward", _bloom),
    "MptAttention": _Own("forward", _mpt),
    "FalconAttention": _Own("forward", _falcon),
}


def has_own_attention(layer: nn.Module) -> bool:
    """Whether a layer computes attention in its own method, which is replaced here."""
    return any(type(module).__name__ in _OWN for module in layer.modules())


def replace_own_attention(model: PreTrainedModel) -> None:
    """Make modules with their own attention method use the plan of a forward. Changes the modules in place."""
    forward = _CurrentForward()
    found = False
    for module in model.base_model.modules():
        own = _OWN.get(type(module).__name__)
        if own is None:
            continue
        found = True
        setattr(module, own.method, partial(own.attend, module, forward))
        if hasattr(module, "layer_id"):  # GPT-Neo
            module.layer_idx = module.layer_id
            module.window_of_mask = module.config.window_size if module.attention_type == "local" else None
    if found:
        model.register_forward_pre_hook(forward.take, with_kwargs=True)
        model.register_forward_hook(forward.drop, always_call=True)
