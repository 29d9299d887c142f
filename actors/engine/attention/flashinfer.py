"""Attention by FlashInfer's kernels for paged caches. The extra `flashinfer` installs them.

FlashInfer plans a forward on the host, and itself copies the plan and its input arrays to the device. A round with a
branching tree is planned with a mask that has one bit for each row and slot; other rounds are causal.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from actors.engine.attention.interface import Scoring, write_slots
from actors.engine.attention.visibility import visible_bits
from actors.engine.batch import PackedBatch
from actors.engine.kv_cache import KvCache
from actors.errors import ModelError

# For sums over split contexts: with 64 heads of 128 they exceed the 128 MiB that FlashInfer's documentation recommends.
_WORKSPACE_BYTES = 384 << 20
_DTYPES = (torch.float16, torch.bfloat16)
_CHOOSE = "choose 'triton_tree' or 'padded'"


def wrapper_class() -> type:
    """FlashInfer's class for prefill and verification over a paged cache. Raises ModelError where it is missing."""
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except ImportError as error:
        raise ModelError(
            f"attention is 'flashinfer', which cannot be imported ({error}): pip install 'paceline[flashinfer]', or "
            f"{_CHOOSE}"
        ) from error
    return BatchPrefillWithPagedKVCacheWrapper


class FlashInfer:
    """FlashInfer's wrappers of one runner. All its forwards use them, because each wrapper allocates buffers."""

    def __init__(self, device: torch.device) -> None:
        """Raises ModelError where FlashInfer is missing."""
        self._class = wrapper_class()
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[Hashable, Any] = {}

    def wrapper(self, key: Hashable, backend: str) -> Any:
        """The wrapper for one kind of layers and of forwards."""
        if (key, backend) not in self._wrappers:
            self._wrappers[key, backend] = self._class(self._workspace, "NHD", backend=backend)
        return self._wrappers[key, backend]


class FlashInferPlan:
    """`AttentionPlan` of one forward. Layers of one kind share a plan, which the first of them makes."""

    def __init__(self, flashinfer: FlashInfer, batch: PackedBatch, slots: torch.Tensor, kv: KvCache) -> None:
        """slots: int64 [rows], on the device, those of padding included."""
        self._flashinfer = flashinfer
        self._batch = batch
        self._slots = slots
        self._kv = kv
        self._planned: dict[Hashable, Any] = {}

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        _check(query, scoring, self._kv.shares_values(layer))
        pool_keys, pool_values = write_slots(self._kv, layer, self._slots, keys, values)
        kind = (*query.shape[1:], *values.shape[1:], scoring.scale, scoring.sliding_window, scoring.softcap)
        wrapper = self._planned.get(kind)
        if wrapper is None:
            wrapper = self._planned[kind] = self._plan(kind, query, values, scoring)
        output = query.new_zeros((*query.shape[:2], values.shape[2]))
        num_rows, num_slots, block_size = self._batch.num_rows, self._kv.num_slots, self._batch.block_size
        pages = tuple(pool[:num_slots].unflatten(0, (-1, block_size)) for pool in (pool_keys, pool_values))
        wrapper.run(query[:num_rows], pages, out=output[:num_rows])
        return output

    def _plan(self, kind: Hashable, query: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> Any:
        batch, window = self._batch, scoring.sliding_window
        branches = bool((batch.tree_starts < batch.contexts).any())
        is_masked = branches or (window or 0) < 0
        num_pages = -(-batch.contexts // batch.block_size)
        page_starts = np.zeros(len(num_pages) + 1, np.int32)
        np.cumsum(num_pages, out=page_starts[1:])
        pages = [table[:count] for table, count in zip(batch.block_tables, num_pages, strict=True)]
        bits, bit_starts = visible_bits(batch, window) if is_masked else (None, None)
        # Only the fa2 kernels take masks, and a wrapper keeps the kernels that `auto` chose at its first plan.
        wrapper = self._flashinfer.wrapper(kind, "fa2" if is_masked else "auto")
        wrapper.plan(
            torch.from_numpy(batch.first_rows),
            torch.from_numpy(page_starts),
            torch.from_numpy(np.concatenate(pages)),
            torch.from_numpy(batch.contexts - (num_pages - 1) * batch.block_size),
            num_qo_heads=query.shape[1],
            num_kv_heads=values.shape[1],
            head_dim_qk=query.shape[2],
            head_dim_vo=values.shape[2],
            page_size=batch.block_size,
            packed_custom_mask=None if bits is None else torch.from_numpy(bits),
            causal=not is_masked,
            # FlashInfer's window counts slots, ours positions. They differ in trees. A mask includes the window.
            window_left=-1 if is_masked or window is None else window - 1,
            sm_scale=scoring.scale,
            logits_soft_cap=scoring.softcap,
            q_data_type=query.dtype,
        )
        if bit_starts is not None:
            # For packed masks, FlashInfer uses offsets in bits as offsets in bytes (its pull request 2201).
            wrapper._mask_indptr_buf.copy_(torch.from_numpy(bit_starts))
        return wrapper


def _check(query: torch.Tensor, scoring: Scoring, shares_values: bool) -> None:
    """Raises ModelError for a layer that FlashInfer does not compute, or computes with another class."""
    for is_found, what in (
        (scoring.sinks is not None, "attention sinks"),
        (shares_values, "latent attention"),
        (query.dtype not in _DTYPES, f"dtype {str(query.dtype).removeprefix('torch.')}"),
    ):
        if is_found:
            raise ModelError(
                f"attention is 'flashinfer' and the model has {what}, which it does not compute; {_CHOOSE}"
            )
