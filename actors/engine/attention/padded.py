"""Attention by torch's own kernels on padded groups of sequences: runs everywhere, and is the reference for others."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numba import njit
from torch.nn.functional import pad, scaled_dot_product_attention

from actors.engine.attention.interface import Scoring, write_slots
from actors.engine.attention.visibility import hidden_slots
from actors.engine.batch import PackedBatch
from actors.engine.kv_cache import KvCache

_MAX_PADDED_ROWS = 64  # sequences with more rows, such as prefill chunks, are computed in separate calls
_PADDING_FOR_A_CALL = 512  # slots of padding that cost as much as a further attention call


def group_sequences(num_rows: np.ndarray, contexts: np.ndarray) -> list[list[int]]:
    """Groups of sequences for one padded call: those with few rows and contexts of similar length.

    num_rows, contexts: int32 [S], rows and slots of each sequence.
    """
    rows, slots = num_rows.tolist(), contexts.tolist()
    groups = [[index] for index, count in enumerate(rows) if count > _MAX_PADDED_ROWS]
    few = sorted((index for index, count in enumerate(rows) if count <= _MAX_PADDED_ROWS), key=lambda s: -slots[s])
    longest = 0
    for index, sequence in enumerate(few):
        saved = (longest - slots[sequence]) * (len(few) - index)
        if index == 0 or saved > _PADDING_FOR_A_CALL:
            groups.append([])
            longest = slots[sequence]
        groups[-1].append(sequence)
    return groups


@dataclass(slots=True)
class _Group:
    """Sequences attended in one padded call: S of them, at most Q rows and L slots each."""

    sequences: np.ndarray  # int64 [S]
    num_rows: int  # Q
    num_slots: int  # L
    first_row: int  # of the first sequence
    rows: torch.Tensor | None = None  # int64 [S * Q]: packed row of each padded row; None: rows first..first+Q, S == 1
    # int32 [S * blocks]: with L slots and more; None: slots first..first+L are contiguous, S == 1
    blocks: torch.Tensor | None = None
    first_slot: int = 0  # for blocks None
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)  # by sliding window


class PaddedPlan:
    """Scaled dot-product attention on a padded gather; any device that torch has a kernel for.

    A lone sequence in contiguous blocks is read in place. Query heads that share a key head are laid out as further
    query rows, so keys and values are never repeated.
    """

    def __init__(self, batch: PackedBatch, kv: KvCache, device: torch.device, num_rows: int) -> None:
        """num_rows: rows of the forward. Those after the batch's own are padding."""
        slots = np.full(num_rows, kv.padding_slot, dtype=np.int64)
        slots[: batch.num_rows] = batch.slots
        self.kv = kv
        self.slots = torch.from_numpy(slots).to(device)
        self.batch = batch
        self._device = device
        self._num_rows = num_rows
        self._padding = num_rows - batch.num_rows

    @cached_property
    def _groups(self) -> tuple[list[_Group], torch.Tensor | None]:
        """The groups, and where each row of the forward is among the padded rows of all groups; None: in its place.
        Fused layers need neither."""
        batch = self.batch
        counts, contexts = np.diff(batch.first_rows), batch.contexts
        places = np.zeros(self._num_rows, dtype=np.int64)  # rows of padding take what the first row has
        groups: list[_Group] = []
        first_place = 0
        for members in group_sequences(counts, contexts):
            group = self._plan_group(np.array(members), counts, contexts, places, first_place)
            groups.append(group)
            first_place += len(members) * group.num_rows
        is_alone = len(groups) == 1 and groups[0].rows is None
        return groups, None if is_alone else self._index(places)

    def _plan_group(
        self, sequences: np.ndarray, counts: np.ndarray, contexts: np.ndarray, places: np.ndarray, first_place: int
    ) -> _Group:
        batch = self.batch
        group = _Group(
            sequences,
            num_rows=int(counts[sequences].max()),
            num_slots=int(contexts[sequences].max()),
            first_row=int(batch.first_rows[sequences[0]]),
        )
        rows = place_rows(batch.first_rows, sequences, group.num_rows, first_place, places)
        blocks = batch.block_tables[sequences, : -(-group.num_slots // batch.block_size)]
        if len(sequences) > 1:
            group.rows = self._index(rows)
        elif bool((np.diff(blocks) == 1).all()):
            group.first_slot = int(blocks[0, 0]) * batch.block_size
            return group
        group.blocks = self._index(blocks.reshape(-1))
        return group

    def _index(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        keys, values = write_slots(self.kv, layer, self.slots, keys, values)
        groups, back = self._groups
        if back is None:
            own = query[: self._num_rows - self._padding]
            attended = self._attend_group(groups[0], layer, own, keys=keys, values=values, scoring=scoring)
            return pad(attended, (0, 0, 0, 0, 0, self._padding)) if self._padding else attended
        parts = []
        for group in groups:
            first = group.first_row
            own = query[first : first + group.num_rows] if group.rows is None else query.index_select(0, group.rows)
            parts.append(self._attend_group(group, layer, own, keys=keys, values=values, scoring=scoring))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.index_select(0, back)

    def _attend_group(
        self,
        group: _Group,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        """query [S * Q, heads, head_dim] -> [S * Q, heads, value_dim]."""
        sequences, num_rows, num_slots = len(group.sequences), group.num_rows, group.num_slots
        heads, kv_heads = query.shape[1], keys.shape[1]
        shared = heads // kv_heads
        if group.blocks is None:
            key = keys[group.first_slot : group.first_slot + num_slots]
            value = values[group.first_slot : group.first_slot + num_slots]
        else:
            key, value = self.kv.gather(layer, group.blocks, self.batch.block_size)
        key = key.view(sequences, -1, kv_heads, key.shape[-1])[:, :num_slots].transpose(1, 2)
        value = value.view(sequences, -1, kv_heads, value.shape[-1])[:, :num_slots].transpose(1, 2)
        # [S * Q, kv_heads * shared, D] -> [S, kv_heads, shared * Q, D]
        grouped = query.reshape((sequences, num_rows, kv_heads, shared, -1)).permute((0, 2, 3, 1, 4))
        grouped = grouped.reshape(sequences, kv_heads, shared * num_rows, -1)
        mask = self._mask(group, scoring.sliding_window, shared, query.dtype)
        if scoring.softcap is None and scoring.sinks is None:
            attended = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scoring.scale)
        else:
            weights = _weights(torch.matmul(grouped, key.transpose(2, 3)) * scoring.scale, mask, num_rows, scoring)
            attended = torch.matmul(weights.to(query.dtype), value)
        attended = attended.view((sequences, kv_heads, shared, num_rows, -1)).permute((0, 3, 1, 2, 4))
        return attended.reshape(sequences * num_rows, heads, -1)

    def _mask(self, group: _Group, sliding_window: int | None, shared: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive [S, 1, shared * Q, L], or None if everything is visible. Built once a forward, not per layer."""
        if sliding_window in group.masks:
            return group.masks[sliding_window]
        hidden = hidden_slots(self.batch, group.sequences, group.num_rows, group.num_slots, sliding_window)
        mask = None
        if hidden is not None:
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device)
            mask.masked_fill_(self._index(hidden), float("-inf"))
            mask = mask.repeat(1, shared, 1).unsqueeze(1)
        group.masks[sliding_window] = mask
        return mask


def _weights(scores: torch.Tensor, mask: torch.Tensor | None, num_rows: int, scoring: Scoring) -> torch.Tensor:
    """scores [S, kv_heads, shared * Q, L], Q = num_rows -> weights of the values, float32 of the same shape."""
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores + mask
    if scoring.sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    sinks = scoring.sinks.to(scores.dtype).view((1, scores.shape[1], -1, 1)).repeat_interleave(num_rows, dim=2)
    scores = torch.cat([scores, sinks.expand(len(scores), -1, -1, -1)], dim=-1)
    return torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :-1]


@njit(cache=True, nogil=True)
def place_rows(
    first_rows: np.ndarray, sequences: np.ndarray, num_rows: int, first_place: int, places: np.ndarray
) -> np.ndarray:
    """int64 [S * num_rows]: the packed row of each padded row of some sequences, 0 for padding. `places` of the packed
    rows become those of the padded ones, from first_place on."""
    rows = np.zeros(len(sequences) * num_rows, np.int64)
    for index, s in enumerate(sequences):
        for own in range(first_rows[s + 1] - first_rows[s]):
            rows[index * num_rows + own] = first_rows[s] + own
            places[first_rows[s] + own] = first_place + index * num_rows + own
    return rows
