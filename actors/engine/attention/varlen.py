"""Attention of rounds with prompt chunks: torch's kernel for ragged batches attends for their rows, the tree kernel for
all others.

The tree kernel writes keys and values of all rows. Those of each chunk's sequence are then gathered from the cache, as
torch's FlashAttention 2 takes no pages of fewer than 256 slots.
"""

from __future__ import annotations

import torch
from torch.nn.attention.varlen import varlen_attn

from actors.engine.attention.interface import Scoring
from actors.engine.attention.prompt_chunks import PromptChunks
from actors.engine.attention.tree_rows import WRITTEN_ONLY, TreeRows
from actors.engine.attention.triton_tree import TreePlan
from actors.engine.kv_cache import KvCache
from actors.engine.row_tiers import context_tier

_MOST_GATHERED_BYTES = 512 << 20  # keys and values of a layer; 128 k slots of 8 heads of 128
_LARGEST_HEAD = 256  # and a multiple of 8
_DTYPES = (torch.float16, torch.bfloat16)


class VarlenPlan:
    """`AttentionPlan` of one forward. Layers that torch's kernel does not support are left to the tree kernel."""

    def __init__(self, rows: TreeRows, kv: KvCache, block_size: int, max_context: int, chunks: PromptChunks) -> None:
        """Arguments as of `TreePlan`. chunks: of the same forward."""
        self._kv = kv
        self._chunks = chunks
        self._all = TreePlan(rows, kv, block_size, max_context)
        begins = rows.begins.index_fill(0, chunks.sequences, WRITTEN_ONLY)
        self._others = TreePlan(rows._replace(begins=begins), kv, block_size, context_tier(chunks.other_context))

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        if not self._has_kernel_for(query, values, scoring):
            return self._all.attend(layer, query, keys, values, scoring)
        output = self._others.attend(layer, query, keys, values, scoring)
        chunks, window = self._chunks, scoring.sliding_window
        pool_keys, pool_values = self._kv.layer(layer)
        attended = varlen_attn(
            query.index_select(0, chunks.rows),
            pool_keys.index_select(0, chunks.key_slots),
            pool_values.index_select(0, chunks.key_slots),
            chunks.row_starts,
            chunks.key_starts,
            chunks.most_rows,
            chunks.most_keys,
            scale=scoring.scale,
            window_size=(-1 if window is None else window - 1, 0),  # slots before and after a row's own
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        return output.index_copy_(0, chunks.rows, attended)

    def _has_kernel_for(self, query: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> bool:
        head_dim, (_, kv_heads, value_dim) = query.shape[2], values.shape
        gathered = len(self._chunks.key_slots) * kv_heads * 2 * head_dim * query.element_size()
        return (
            scoring.softcap is None
            and (scoring.sliding_window or 0) >= 0
            and scoring.sinks is None
            and query.dtype in _DTYPES
            and head_dim == value_dim
            and head_dim <= _LARGEST_HEAD
            and head_dim % 8 == 0
            and gathered <= _MOST_GATHERED_BYTES
        )
