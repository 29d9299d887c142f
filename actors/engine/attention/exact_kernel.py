"""`exact` on a GPU: a program for each row and head, which reads the row's visible slots in order of position.

Sums are taken without tensor cores, whose order of addition is not documented. So the bits of a row depend on its own
context alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from actors.engine.attention.interface import Scoring

_BLOCK_KEYS = 32  # that a program reads at a time, from the row's first visible slot on


@triton.jit
def attend_row_kernel(
    query,  # [rows, heads, head_dim]
    keys,  # [slots, kv_heads, head_dim]
    values,  # [slots, kv_heads, value_dim]
    context,  # int64: visible slots of row 0, of row 1, ...
    starts,  # int64 [rows + 1]
    output,  # [rows, heads, value_dim], contiguous
    query_row_stride,
    query_head_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    scale,
    softcap,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,  # query heads of a key head
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_dims, value_dims = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    of_query = query + row * query_row_stride + head * query_head_stride
    own = tl.load(of_query + key_dims, mask=key_dims < HEAD_DIM, other=0.0).to(tl.float32)
    of_keys = keys + (head // SHARED) * key_head_stride
    of_values = values + (head // SHARED) * value_head_stride
    acc = tl.zeros([VALUE_BLOCK], tl.float32)
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    for start in range(first, end, BLOCK_KEYS):
        places = start + tl.arange(0, BLOCK_KEYS)
        is_seen = places < end
        slots = tl.load(context + places, mask=is_seen, other=0)
        key = tl.load(
            of_keys + slots[:, None] * key_slot_stride + key_dims[None, :],
            mask=is_seen[:, None] & (key_dims < HEAD_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        scores = tl.sum(key * own[None, :], 1) * scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), right at both infinities
            scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 0))
        weights = tl.exp(scores - higher)
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(weights, 0)
        value = tl.load(
            of_values + slots[:, None] * value_slot_stride + value_dims[None, :],
            mask=is_seen[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        acc = acc * shrink + tl.sum(weights[:, None] * value, 0)
        highest = higher
    place = output + (row * HEADS + head) * VALUE_DIM + value_dims
    tl.store(place, (acc / total).to(output.dtype.element_ty), mask=value_dims < VALUE_DIM)


def row_constants(heads: int, kv_heads: int, head_dim: int, value_dim: int, has_softcap: bool) -> dict[str, int]:
    """What the kernel is compiled for."""
    return {
        "HEADS": heads,
        "SHARED": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "KEY_BLOCK": triton.next_power_of_2(head_dim),
        "VALUE_BLOCK": triton.next_power_of_2(value_dim),
        "BLOCK_KEYS": _BLOCK_KEYS,
        "HAS_SOFTCAP": has_softcap,
    }


def attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: torch.Tensor,
    starts: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    """query [tile, heads, head_dim], keys and values [slots, kv_heads, dim] -> [tile, heads, value_dim].

    context: int64, visible slots of row 0, of row 1, ...; starts: int64 [rows + 1], each row's first place in it. Rows
    of the tile after these are padding and give zeros.
    """
    softcap = scoring.softcap or 0.0
    query, keys, values = (
        tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, keys, values)
    )
    heads, head_dim = query.shape[1:]
    kv_heads, value_dim = values.shape[1:]
    output = query.new_zeros((len(query), heads, value_dim))
    with torch.cuda.device_of(query):
        attend_row_kernel[(len(starts) - 1, heads)](
            query,
            keys,
            values,
            context,
            starts,
            output,
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            scoring.scale,
            softcap,
            **row_constants(heads, kv_heads, head_dim, value_dim, has_softcap=softcap > 0.0),
        )
    return output
