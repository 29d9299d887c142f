"""The tensors behind the block pool: keys and values of all attention layers, addressed by slot."""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequences
from typing import NamedTuple

import numpy as np
import torch

_NO_MOVES = np.empty((2, 0), np.int64)


def check_device(device: torch.device) -> None:
    """Raises torch's error when a device has failed for good: after some errors of CUDA every later call fails."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class LayerShape(NamedTuple):
    """Keys and values of one token in an attention layer. A tensor-parallel rank has a share of the heads."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    shares_values: bool = False  # values are the first value_dim columns of the keys, and stored there alone

    @property
    def stored_dims(self) -> tuple[int, ...]:
        return (self.key_dim,) if self.shares_values else (self.key_dim, self.value_dim)

    @staticmethod
    def without_keys(dtype: torch.dtype) -> LayerShape:
        """The shape of a layer that does not attend."""
        return LayerShape(0, 0, 0, dtype)


class KvCache:
    """Keys and values by layer, each [num_slots + 1, kv_heads, dim]. Slot = block * block_size + offset.

    Backends write finite numbers alone, zeros for others: a row multiplies what it does not see by 0, which NaN would
    survive, so that one overflow would spread to other requests. Layers of one shape share a tensor, so the number of
    kernels of a move does not depend on the number of layers.
    """

    def __init__(self, num_slots: int, device: torch.device, layers: Sequences[LayerShape]) -> None:
        self.num_slots = num_slots
        self.padding_slot = num_slots  # one slot after all blocks, written by padding rows
        self.device = device
        kinds = [
            (layer.kv_heads, dim, layer.dtype) for layer in layers for dim in layer.stored_dims
        ]  # keys and values of layer 0, of layer 1, ...
        self._pools = {kind: self._zeros(kinds.count(kind), *kind) for kind in dict.fromkeys(kinds)}
        parts = {kind: iter(pool.unbind(0)) for kind, pool in self._pools.items()}
        tensors = iter([next(parts[kind]) for kind in kinds])
        self._layers = []
        for layer in layers:
            keys = next(tensors)
            self._layers.append((keys, keys[..., : layer.value_dim] if layer.shares_values else next(tensors)))
        self._shares_values = [layer.shares_values for layer in layers]
        # int64 [layers, 2]: where each layer's keys and values are
        self.addresses = np.array([[tensor.data_ptr() for tensor in layer] for layer in self._layers], dtype=np.int64)
        self._gathered: dict[tuple[torch.dtype, torch.Size, int, bool], torch.Tensor] = {}
        self._moves = _NO_MOVES  # not copied yet

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value tensors of a layer."""
        return self._layers[layer]

    def shares_values(self, layer: int) -> bool:
        """Whether the values of a layer are the first columns of its keys."""
        return self._shares_values[layer]

    @property
    def num_bytes(self) -> int:
        return sum(pool.numel() * pool.element_size() for pool in self._pools.values())

    def _zeros(self, count: int, kv_heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros for all slots, which are read before they are written, too."""
        shape = (count, self.num_slots + 1, kv_heads, dim)
        if self.device.type != "cpu" or math.prod(shape) == 0:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        # numpy's zeros take memory from the system at the first write, torch's at once.
        return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)

    def gather(self, layer: int, blocks: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the slots of some blocks (int32 [n]), each [n * block_size, kv_heads, head_dim]. The next
        call overwrites them."""
        keys, values = self._layers[layer]
        gathered = self._gather(keys, blocks, block_size, False)
        if self._shares_values[layer]:
            return gathered, gathered[..., : values.shape[-1]]
        return gathered, self._gather(values, blocks, block_size, True)

    def _gather(self, tensor: torch.Tensor, blocks: torch.Tensor, block_size: int, is_value: bool) -> torch.Tensor:
        # Reused: on CPU, page faults of a new buffer for each layer cost several times the copy.
        kind = tensor.dtype, tensor.shape[1:], block_size, is_value
        buffer = self._gathered.get(kind)
        if buffer is None or len(buffer) < len(blocks):
            room = len(blocks) + len(blocks) // 4
            buffer = self._gathered[kind] = tensor.new_empty((room, block_size, *tensor.shape[1:]))
        by_block = tensor[: self.num_slots].unflatten(0, (-1, block_size))
        return torch.index_select(by_block, 0, blocks, out=buffer[: len(blocks)]).flatten(0, 1)

    def move(self, moves: np.ndarray) -> None:
        """Copy slots moves[0] to moves[1], int64 [2, n], in all layers, at the latest before the next forward. The two
        may overlap."""
        if self._moves.size:
            if np.isin(moves, self._moves[1]).any():
                self.settle()
            moves = np.concatenate([self._moves, moves], axis=1)
        self._moves = moves

    @property
    def waiting_moves(self) -> np.ndarray:
        """int64 [2, n]: sources and destinations of the moves that are still to be copied."""
        return self._moves

    def settle(self) -> None:
        """Do all moves, those of all sequences at once."""
        if self._moves.size:
            self.copy_waiting(torch.from_numpy(self._moves).to(self.device))

    def copy_waiting(self, moves: torch.Tensor) -> None:
        """Do the waiting moves. moves: the same on the device, maybe with padding. If that fails, they still wait: KV
        of accepted tokens is wrong until they are done."""
        self.copy_slots(moves)
        self._moves = _NO_MOVES

    def drop_moves(self) -> None:
        """Forget the waiting moves. To be called when no sequence is left."""
        self._moves = _NO_MOVES

    def copy_slots(self, moves: torch.Tensor) -> None:
        """Copy slots moves[0] to moves[1], int64 [2, n] on the device, in all layers. All are read before one is
        written, so that a copy for which there is no memory changes nothing."""
        sources, destinations = moves.unbind(0)
        copies = [pool.index_select(1, sources) for pool in self._pools.values()]
        for pool, copied in zip(self._pools.values(), copies, strict=True):
            pool.index_copy_(1, destinations, copied)
