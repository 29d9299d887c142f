"""The Triton kernel of a share of an embedding: rows that other ranks have are zeros."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(do_not_specialize=["first_id", "num_ids"])
def embedding_kernel(  # type: ignore[no-untyped-def]
    ids,  # int64 [rows]
    weight,  # [num_ids, width]
    outputs,  # [rows, width], written
    first_id,  # of the weight's first row
    num_ids,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(ids + row) - first_id
    is_here = (place >= 0) & (place < num_ids)
    values = tl.load(weight + place * width + columns, mask=is_here & (columns < width), other=0.0)
    tl.store(outputs + row.to(tl.int64) * width + columns, values, mask=columns < width)


def launch(ids: torch.Tensor, weight: torch.Tensor, outputs: torch.Tensor, first_id: int) -> None:
    """ids: contiguous int64. outputs: [*ids, width]."""
    num_ids, width = weight.shape
    with torch.cuda.device_of(ids):
        embedding_kernel[(ids.numel(), triton.cdiv(width, _BLOCK))](
            ids, weight, outputs, first_id, num_ids, width, BLOCK=_BLOCK
        )
