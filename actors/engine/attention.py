"""The attention function of all models: writes keys and values into the paged cache and attends for each sequence.

Registered with transformers' `AttentionInterface`, so models are not patched. The plan of a forward is passed as the
keyword argument `paged_plan` through the model's own `**kwargs`. No mask function is registered under the name, so
models build no mask.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from actors.engine.batch import PackedBatch, SequenceSpan, visible
from actors.engine.kv_cache import KvCache
from actors.errors import ModelError

ATTENTION_NAME = "paceline_paged"

_MAX_PADDED_ROWS = 64  # sequences with more rows, such as prefill chunks, have a call of their own
_PADDING_FOR_A_CALL = 512  # slots of padding that cost as much as a further attention call

# Unsupported arguments that change attention: sinks, biases, masks of heads.
_NOT_COMPUTED = ("s_aux", "sinks", "position_bias", "alibi", "head_mask", "block_mask")


@dataclass(frozen=True, slots=True)
class Scoring:
    """A layer's parameters of the attention weights."""

    scale: float
    sliding_window: int | None  # positions a row sees, itself included; None: all
    softcap: float | None  # limits scores to (-softcap, softcap); None: no limit


class AttentionPlan(Protocol):
    """How the rows of one forward attend."""

    kv: KvCache
    slots: torch.Tensor  # int64 [rows]: where each row's keys and values are written

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """query [rows, heads, head_dim], keys and values [num_slots, kv_heads, head_dim] -> [rows, heads, head_dim]."""
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    paged_plan: AttentionPlan,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim] -> [1, rows, heads, head_dim]."""
    # Ignoring an unsupported argument would silently change the output.
    unknown = [name for name in _NOT_COMPUTED if kwargs.get(name) is not None]
    if attention_mask is not None or unknown:
        raise ModelError(
            f"{type(module).__name__} attends with {', '.join(unknown) or 'a mask of its own'}; "
            "causal attention with sliding windows and soft caps is computed"
        )
    new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    keys, values = paged_plan.kv.layer(module.layer_idx, new_keys, new_values)
    keys.index_copy_(0, paged_plan.slots, new_keys)
    values.index_copy_(0, paged_plan.slots, new_values)
    scale = float(query.shape[-1]) ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, sliding_window, softcap=kwargs.get("softcap"))
    rows = query[0].transpose(0, 1)
    return paged_plan.attend(rows, keys, values, scoring).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


def group_spans(spans: Sequences[SequenceSpan]) -> list[list[SequenceSpan]]:
    """Groups of sequences for one padded call: those with few rows and contexts of similar length."""
    groups = [[span] for span in spans if span.num_rows > _MAX_PADDED_ROWS]
    few = sorted((span for span in spans if span.num_rows <= _MAX_PADDED_ROWS), key=lambda span: -len(span.slots))
    longest = 0
    for index, span in enumerate(few):
        saved = (longest - len(span.slots)) * (len(few) - index)
        if index == 0 or saved > _PADDING_FOR_A_CALL:
            groups.append([])
            longest = len(span.slots)
        groups[-1].append(span)
    return groups


@dataclass(slots=True)
class _Group:
    """Sequences attended in one padded call: S of them, at most Q rows and L slots each."""

    spans: list[SequenceSpan]
    num_rows: int  # Q
    num_slots: int  # L
    rows: torch.Tensor | None = None  # int64 [S * Q]: packed row of each padded row; None: rows first..first+Q, S == 1
    context: torch.Tensor | None = None  # int64 [S * L]: slots; None: slots first..first+L are contiguous, S == 1
    first_slot: int = 0  # for context None
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
        self._device = device
        self._num_rows = num_rows
        self._padding = num_rows - batch.num_rows
        self._groups = [self._plan_group(spans) for spans in group_spans(batch.spans)]
        # int64 [rows]: place of each packed row in the padded rows of all groups; None: they are the same
        self._back = None if self._is_alone else self._index(self._places())

    @property
    def _is_alone(self) -> bool:
        """Whether the padded rows are the packed rows."""
        return len(self._groups) == 1 and self._groups[0].rows is None

    def _places(self) -> np.ndarray:
        places = np.zeros(self._num_rows, dtype=np.int64)  # rows of padding take what the first row has
        first = 0
        for group in self._groups:
            for index, span in enumerate(group.spans):
                begin = first + index * group.num_rows
                places[span.first_row : span.first_row + span.num_rows] = np.arange(begin, begin + span.num_rows)
            first += len(group.spans) * group.num_rows
        return places

    def _plan_group(self, spans: list[SequenceSpan]) -> _Group:
        num_rows = max(span.num_rows for span in spans)
        num_slots = max(len(span.slots) for span in spans)
        if len(spans) == 1:
            slots = spans[0].slots
            contiguous = bool(slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all())
            context = None if contiguous else self._index(slots)
            return _Group(spans, num_rows, num_slots, context=context, first_slot=int(slots[0]))
        rows = np.zeros((len(spans), num_rows), dtype=np.int64)
        context_slots = np.zeros((len(spans), num_slots), dtype=np.int64)
        for index, span in enumerate(spans):
            rows[index, : span.num_rows] = np.arange(span.first_row, span.first_row + span.num_rows)
            context_slots[index, : len(span.slots)] = span.slots
        return _Group(
            spans,
            num_rows,
            num_slots,
            rows=self._index(rows.reshape(-1)),
            context=self._index(context_slots.reshape(-1)),
        )

    def _index(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        if self._back is None:
            own = query[: self._num_rows - self._padding]
            attended = self._attend_group(self._groups[0], own, keys=keys, values=values, scoring=scoring)
            return pad(attended, (0, 0, 0, 0, 0, self._padding)) if self._padding else attended
        parts = []
        for group in self._groups:
            first = group.spans[0].first_row
            own = query[first : first + group.num_rows] if group.rows is None else query.index_select(0, group.rows)
            parts.append(self._attend_group(group, own, keys=keys, values=values, scoring=scoring))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.index_select(0, self._back)

    def _attend_group(
        self,
        group: _Group,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        """query [S * Q, heads, head_dim] -> [S * Q, heads, value_dim]."""
        sequences, num_rows, num_slots = len(group.spans), group.num_rows, group.num_slots
        heads, kv_heads = query.shape[1], keys.shape[1]
        shared = heads // kv_heads
        if group.context is None:
            key = keys[group.first_slot : group.first_slot + num_slots]
            value = values[group.first_slot : group.first_slot + num_slots]
        else:
            key, value = self.kv.gather(keys, values, group.context)
        key = key.view(sequences, num_slots, kv_heads, -1).transpose(1, 2)
        value = value.view(sequences, num_slots, kv_heads, -1).transpose(1, 2)
        # [S * Q, kv_heads * shared, D] -> [S, kv_heads, shared * Q, D]
        grouped = query.reshape((sequences, num_rows, kv_heads, shared, -1)).permute((0, 2, 3, 1, 4))
        grouped = grouped.reshape(sequences, kv_heads, shared * num_rows, -1)
        mask = self._mask(group, scoring.sliding_window, shared, query.dtype)
        if scoring.softcap is None:
            attended = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scoring.scale)
        else:
            scores = torch.matmul(grouped, key.transpose(2, 3)) * scoring.scale
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
            if mask is not None:
                scores = scores + mask
            attended = torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype), value)
        attended = attended.view((sequences, kv_heads, shared, num_rows, -1)).permute((0, 3, 1, 2, 4))
        return attended.reshape(sequences * num_rows, heads, -1)

    def _mask(self, group: _Group, sliding_window: int | None, shared: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive [S, 1, shared * Q, L], or None if everything is visible. Built once a forward, not per layer."""
        if sliding_window in group.masks:
            return group.masks[sliding_window]
        sequences, num_rows, num_slots = len(group.spans), group.num_rows, group.num_slots
        allowed = np.zeros((sequences, num_rows, num_slots), dtype=bool)
        allowed[:, :, 0] = True  # a padded row must see one slot, or its softmax is undefined
        for index, span in enumerate(group.spans):
            allowed[index, : span.num_rows, : len(span.slots)] = visible(span, sliding_window)
        mask = None
        if not allowed.all():
            hidden = torch.from_numpy(~allowed).to(self._device)
            mask = torch.zeros(allowed.shape, dtype=dtype, device=self._device)
            mask.masked_fill_(hidden, float("-inf"))
            mask = mask.repeat(1, shared, 1).unsqueeze(1)
        group.masks[sliding_window] = mask
        return mask
