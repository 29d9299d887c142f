"""Attention whose result for a row depends only on the row's own context, bit for bit.

A library kernel chooses its blocking by the shape of the whole batch, and a tree node's keys are in other slots than
the same token's keys in plain decoding. Here each row and head runs the same loop over its visible slots in order of
position, so drafts, neighbours and padding change no bit. Slower than the other backends.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit

from actors.engine.attention.interface import Scoring, write_slots
from actors.engine.attention.visibility import visible_slots
from actors.engine.batch import PackedBatch
from actors.engine.kv_cache import KvCache
from actors.errors import ModelError


# Reassociation lets a dot product use vector lanes. Its order depends only on head_dim and context.
@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _attend_rows(
    query: np.ndarray,  # float32 [tile, heads, head_dim]
    keys: np.ndarray,  # float32 [slots, kv_heads, head_dim]
    values: np.ndarray,  # float32 [slots, kv_heads, value_dim]
    context: np.ndarray,  # int64 [sum of contexts]: visible slots of row 0, of row 1, ...
    starts: np.ndarray,  # int64 [rows + 1]
    scaling: float,
    softcap: float,  # 0: none
    output: np.ndarray,  # float32 [tile, heads, value_dim]
) -> None:
    heads, head_dim = query.shape[1], query.shape[2]
    rows = len(starts) - 1  # the rest of query is padding
    shared = heads // keys.shape[1]
    value_dim = values.shape[2]
    longest = 0
    for row in range(rows):
        longest = max(longest, starts[row + 1] - starts[row])
    scores = np.empty(longest, dtype=np.float32)
    for row in range(rows):
        first, count = starts[row], starts[row + 1] - starts[row]
        for head in range(heads):
            kv_head = head // shared
            highest = np.float32(-np.inf)
            for index in range(count):
                slot = context[first + index]
                score = np.float32(0.0)
                for dim in range(head_dim):
                    score += query[row, head, dim] * keys[slot, kv_head, dim]
                score *= np.float32(scaling)
                if softcap > 0.0:
                    score = np.float32(math.tanh(score / softcap) * softcap)
                scores[index] = score
                highest = max(highest, score)
            total = np.float32(0.0)
            for index in range(count):
                weight = np.float32(math.exp(scores[index] - highest))
                scores[index] = weight
                total += weight
            for dim in range(value_dim):
                output[row, head, dim] = np.float32(0.0)
            for index in range(count):
                slot = context[first + index]
                weight = scores[index]
                for dim in range(value_dim):
                    output[row, head, dim] += weight * values[slot, kv_head, dim]
            for dim in range(value_dim):
                output[row, head, dim] /= total


class ExactPlan:
    """`AttentionPlan` for `exact: bitwise`: rows [first, first + tile) of a batch, padded to a fixed tile.

    Rows of earlier tiles have written their keys and values by the time a later tile runs, and no row attends to a
    later one, so a batch can be computed tile by tile.
    """

    def __init__(self, batch: PackedBatch, kv: KvCache, first: int, tile: int) -> None:
        self.kv = kv
        self._batch = batch
        self._first = first
        self._last = min(first + tile, batch.num_rows)
        # Visible slots of the rows on the cache's device, by sliding window, as `visible_slots` gives them
        self._contexts: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}
        slots = np.full(tile, kv.padding_slot, dtype=np.int64)
        slots[: self._last - first] = batch.slots[first : self._last]
        self.slots = torch.from_numpy(slots).to(kv.device)

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        if scoring.sinks is not None:
            raise ModelError("exact is 'bitwise' and the model has attention sinks, which are not computed bit for bit")
        keys, values = write_slots(self.kv, layer, self.slots, keys, values)
        window = scoring.sliding_window
        if window not in self._contexts:
            slots, starts = visible_slots(self._batch, self._first, self._last, window)
            self._contexts[window] = torch.from_numpy(slots).to(query.device), torch.from_numpy(starts).to(query.device)
        if query.is_cuda:
            from actors.engine.attention.exact_kernel import attend_rows  # Triton is not installed everywhere
        else:
            attend_rows = _attend_on_cpu
        return attend_rows(query, keys, values, *self._contexts[window], scoring)


def _attend_on_cpu(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: torch.Tensor,
    starts: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """Shapes as in `_attend_rows`, of any dtype -> [tile, heads, value_dim]. Rows without a start give zeros."""
    if keys.dtype != torch.float32:  # converts only the slots that are read
        used, context = torch.unique(context, return_inverse=True)
        keys, values = keys[used].float(), values[used].float()
    output = np.zeros((len(query), query.shape[1], values.shape[2]), dtype=np.float32)
    _attend_rows(
        query.float().contiguous().numpy(),
        keys.numpy(),
        values.numpy(),
        context.numpy(),
        starts.numpy(),
        scoring.scale,
        scoring.softcap or 0.0,
        output,
    )
    return torch.from_numpy(output).to(query.dtype)
