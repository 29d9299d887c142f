"""What torch documents of `varlen_attn`, in plain operations that run anywhere, with its kernel's checks."""

from __future__ import annotations

import torch


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """query [T_q, H_q, D], key and value [T_k, H_kv, D], cu_seq_q and cu_seq_k int32 [N + 1] -> [T_q, H_q, D].

    Row i of a sequence with q rows and k keys sees the keys from i + k - q - left to i + k - q + right; -1 is no limit.
    """
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[2]
    assert query.dtype == key.dtype == value.dtype
    assert key.shape == value.shape
    assert key.shape[2] == head_dim <= 256
    assert head_dim % 8 == 0
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    assert heads == kv_heads or (enable_gqa and heads % kv_heads == 0)
    for starts, total, most in ((cu_seq_q, len(query), max_q), (cu_seq_k, len(key), max_k)):
        assert starts.dtype == torch.int32
        assert starts.device == query.device
        assert starts.is_contiguous()
        assert int(starts[0]) == 0
        assert int(starts[-1]) == total
        assert int(starts.diff().max()) == most
    left, right = window_size
    output = torch.empty_like(query)
    for index in range(len(cu_seq_q) - 1):
        rows = slice(int(cu_seq_q[index]), int(cu_seq_q[index + 1]))
        slots = slice(int(cu_seq_k[index]), int(cu_seq_k[index + 1]))
        keys, values = (tensor[slots].float().repeat_interleave(heads // kv_heads, 1) for tensor in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys) * scale
        num_rows, num_keys = scores.shape[1:]
        last = torch.arange(num_rows, device=query.device)[:, None] + num_keys - num_rows
        places = torch.arange(num_keys, device=query.device)[None]
        is_hidden = torch.zeros_like(scores[0], dtype=torch.bool)
        if left >= 0:
            is_hidden |= places < last - left
        if right >= 0:
            is_hidden |= places > last + right
        weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return output
