"""FlashInfer's wrapper of paged caches, as documentation and source of its version 0.7.2 have it, in plain operations
that run anywhere: what it makes of the arguments of `plan` and `run`, and what it refuses."""

from __future__ import annotations

import torch

PLANNED_KERNELS = ("auto", "fa2")


class BatchPrefillWithPagedKVCacheWrapper:
    """Pages are [pages, page_size, kv_heads, dim], "NHD"."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout == "NHD"
        assert backend in PLANNED_KERNELS
        self._backend = backend
        self._chosen: str | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        head_dim_vo: int | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        window_left: int = -1,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
    ) -> None:
        """Host arrays: qo_indptr and paged_kv_indptr int32 [S + 1], paged_kv_indices int32 [pages],
        paged_kv_last_page_len int32 [S], from 1 to page_size; packed_custom_mask uint8."""
        for array in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert array.dtype == torch.int32
            assert array.device.type == "cpu", "the planner would wait for the device"
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        assert num_qo_heads % num_kv_heads == 0
        # `auto` keeps what it has once chosen: the kernels of fa3, which take no mask, or those of fa2.
        if self._backend == "auto" and self._chosen is None:
            self._chosen = "fa2" if packed_custom_mask is not None else "fa3"
        assert packed_custom_mask is None or (self._chosen or self._backend) == "fa2"
        self._row_starts, self._page_starts, self._pages = qo_indptr, paged_kv_indptr, paged_kv_indices
        self._kv_lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        self._mask = packed_custom_mask
        self._mask_indptr_buf = None
        if packed_custom_mask is not None:
            assert packed_custom_mask.dtype == torch.uint8
            # In bits, though the kernels add it to a pointer to bytes.
            self._mask_indptr_buf = torch.zeros_like(qo_indptr)
            self._mask_indptr_buf[1:] = (qo_indptr.diff() * self._kv_lens).cumsum(0)
        self._heads, self._dims = (num_qo_heads, num_kv_heads), (head_dim_qk, head_dim_vo or head_dim_qk)
        self._page_size, self._dtype = page_size, q_data_type
        self._causal, self._window_left = causal, window_left
        self._scale, self._soft_cap = sm_scale or head_dim_qk**-0.5, logits_soft_cap or 0.0

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        """q [rows, heads, head_dim_qk]; out [rows, heads, head_dim_vo], which it fills."""
        keys, values = paged_kv_cache
        heads, kv_heads = self._heads
        assert q.dtype == keys.dtype == values.dtype == out.dtype == self._dtype
        assert q.shape == (self._row_starts[-1], heads, self._dims[0])
        assert out.shape == (*q.shape[:2], self._dims[1])
        assert out.is_contiguous()
        for pages, dim in ((keys, self._dims[0]), (values, self._dims[1])):
            assert pages.shape[1:] == (self._page_size, kv_heads, dim)
            assert pages.is_contiguous()
        for index, kv_len in enumerate(self._kv_lens.tolist()):
            rows = slice(int(self._row_starts[index]), int(self._row_starts[index + 1]))
            own = self._pages[int(self._page_starts[index]) : int(self._page_starts[index + 1])].to(q.device).long()
            own_keys, own_values = (
                pages[own].flatten(0, 1)[:kv_len].float().repeat_interleave(heads // kv_heads, 1)
                for pages in (keys, values)
            )
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), own_keys) * self._scale
            if self._soft_cap > 0:
                scores = self._soft_cap * torch.tanh(scores / self._soft_cap)
            is_seen = self._seen(index, rows.stop - rows.start, kv_len).to(q.device)
            weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, own_values).to(out.dtype)
        return out

    def _seen(self, index: int, num_rows: int, kv_len: int) -> torch.Tensor:
        """bool [num_rows, kv_len]"""
        row, slot = torch.arange(num_rows)[:, None], torch.arange(kv_len)[None]
        is_seen = torch.ones(num_rows, kv_len, dtype=torch.bool)
        if self._mask is not None:
            assert self._mask_indptr_buf is not None
            offset = row * kv_len + slot
            byte = self._mask[int(self._mask_indptr_buf[index]) + offset // 8].int()
            is_seen &= (byte >> (offset % 8)) & 1 == 1
        elif self._causal:
            is_seen &= slot <= row + kv_len - num_rows
        if self._window_left >= 0:
            is_seen &= slot + num_rows + self._window_left >= kv_len + row
        return is_seen
