"""Reads experts in MXFP4 as gpt-oss is published, so that a rank widens its share of them alone.

A checkpoint has of each weight [experts, inputs, outputs] blocks of 32 inputs: codes, two a byte, [experts, outputs,
blocks, 16], and the exponent of each block, [experts, outputs, blocks]. `transformers` shares out what it reads by the
dimensions of the weight, which the blocks do not have. Here each rank reads them whole, one weight at a time, and cuts
them before they are widened. A share of the inputs may begin and end within a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

BLOCK = 32


def widened_share(
    blocks: Tensor, scales: Tensor, shape: tuple[int, ...], first: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Part of a weight: shape is its size, first its place in the weight, both as (experts, inputs, outputs).

    blocks: uint8 [experts, outputs, blocks, 16]; scales: uint8 [experts, outputs, blocks]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    first_block, end_block = first[1] // BLOCK, -(-(first[1] + shape[1]) // BLOCK)
    part = (
        slice(first[0], first[0] + shape[0]),
        slice(first[2], first[2] + shape[2]),
        slice(first_block, end_block),
    )
    widened: Tensor = convert_moe_packed_tensors(blocks[part], scales[part], dtype=dtype)
    return widened.narrow(1, first[1] - first_block * BLOCK, shape[1]).contiguous()


@contextlib.contextmanager
def read_blocks_whole() -> Iterator[None]:
    """While a model is loaded in shards: blocks and exponents are read whole, and its shares of weights are widened."""
    from transformers.distributed.sharding_utils import DtensorShardOperation
    from transformers.integrations.mxfp4 import Mxfp4Dequantize

    read, widen = DtensorShardOperation.shard_tensor, Mxfp4Dequantize.convert

    def read_whole(self: Any, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None) -> Any:
        is_coded = source.dtype == torch.uint8 if isinstance(source, Tensor) else source.get_dtype() == "U8"
        return source[...].to(device) if is_coded else read(self, source, tensor_idx, device, dtype)

    def widen_share(self: Any, input_dict: dict[str, Any], *, model: Any, full_layer_name: str, **options: Any) -> Any:
        placeholder = model.get_parameter(full_layer_name)
        if not isinstance(placeholder, DTensor):
            return widen(self, input_dict, model=model, full_layer_name=full_layer_name, **options)
        blocks, scales = (
            next(value[0] if isinstance(value, list) else value for name, value in input_dict.items() if kind in name)
            for kind in ("blocks", "scales")
        )
        shape, first = compute_local_shape_and_global_offset(
            placeholder.shape, placeholder.device_mesh, placeholder.placements
        )
        share = widened_share(blocks, scales, shape, first, placeholder.dtype)
        return {full_layer_name: torch.nn.Parameter(share, requires_grad=False)}

    DtensorShardOperation.shard_tensor, Mxfp4Dequantize.convert = read_whole, widen_share
    try:
        yield
    finally:
        DtensorShardOperation.shard_tensor, Mxfp4Dequantize.convert = read, widen
