"""Reads experts in MXFP4 as gpt-oss is published, so that a rank reads and widens its share of them alone.

A checkpoint has of each weight [experts, inputs, outputs] blocks of 32 inputs: codes, two a byte, [experts, outputs,
blocks, 16], and the exponent of each block, [experts, outputs, blocks]. `transformers` shares out what it reads by the
dimensions of the weight, which the blocks do not have. A share of the inputs may begin and end within a block.
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

Shape = tuple[int, ...]  # as (experts, inputs, outputs)


def blocks_of(shape: Shape, first: Shape) -> tuple[slice, slice, slice]:
    """Experts, outputs and blocks that hold part of a weight. shape: of the part; first: its place in the weight."""
    return (
        slice(first[0], first[0] + shape[0]),
        slice(first[2], first[2] + shape[2]),
        slice(first[1] // BLOCK, -(-(first[1] + shape[1]) // BLOCK)),
    )


def widened_share(blocks: Tensor, scales: Tensor, shape: Shape, first: Shape, dtype: torch.dtype) -> Tensor:
    """Part of a weight [experts, inputs, outputs], as of `blocks_of`, from its blocks alone.

    blocks: uint8 [experts, outputs, blocks, 16]; scales: uint8 [experts, outputs, blocks]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    widened: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    return widened.narrow(1, first[1] % BLOCK, shape[1]).contiguous()


@contextlib.contextmanager
def read_own_blocks() -> Iterator[None]:
    """While a model is loaded in shards: a rank reads the blocks of its share of a weight alone, and widens them."""
    from transformers.distributed.sharding_utils import DtensorShardOperation
    from transformers.integrations.mxfp4 import Mxfp4Dequantize

    read, widen = DtensorShardOperation.shard_tensor, Mxfp4Dequantize.convert

    def read_share(self: Any, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None) -> Any:
        is_tensor = isinstance(source, Tensor)
        if not (source.dtype == torch.uint8 if is_tensor else source.get_dtype() == "U8"):
            return read(self, source, tensor_idx, device, dtype)
        experts, outputs, blocks = (source.shape if is_tensor else source.get_shape())[:3]
        whole = (experts, blocks * BLOCK, outputs)
        shape, first = compute_local_shape_and_global_offset(whole, self.device_mesh, self.placements)
        return source[blocks_of(shape, first)].to(device)

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
        widened = widened_share(blocks, scales, shape, first, placeholder.dtype)
        return {full_layer_name: torch.nn.Parameter(widened, requires_grad=False)}

    DtensorShardOperation.shard_tensor, Mxfp4Dequantize.convert = read_share, widen_share
    try:
        yield
    finally:
        DtensorShardOperation.shard_tensor, Mxfp4Dequantize.convert = read, widen
