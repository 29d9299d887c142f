"""The tensors behind the block pool: one key and one value tensor per attention layer, addressed by slot."""

from __future__ import annotations

import math

import numpy as np
import torch


def check_device(device: torch.device) -> None:
    """Raises torch's error when a device has failed for good: after some errors of CUDA every later call fails."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class KvCache:
    """Keys and values by layer, each [num_slots, kv_heads, head_dim]. Slot = block * block_size + offset.

    A layer's tensors are allocated at its first write, when its heads are known (layers may differ, and a
    tensor-parallel rank has a share of them).
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.padding_slot = num_slots  # one slot after all blocks, written by padding rows
        self.device = device
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._gathered: dict[tuple[torch.dtype, torch.Size, bool], torch.Tensor] = {}
        self._moves: dict[int, int] = {}  # that `settle` has still to do: source by destination

    def layer(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value tensors of a layer; key and value [rows, kv_heads, head_dim] show their shape and dtype."""
        tensors = self._layers.get(layer)
        if tensors is None:
            tensors = self._zeros(key), self._zeros(value)
            self._layers[layer] = tensors
        return tensors

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros for all slots: padding reads are multiplied by 0, which NaN would survive."""
        shape = (self.num_slots + 1, *like.shape[1:])
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=like.dtype, device=self.device)
        # numpy's zeros take memory from the system at the first write, torch's at once.
        num_bytes = math.prod(shape) * like.dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(like.dtype).view(shape)

    def gather(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some slots (int64 [n]), each [n, kv_heads, head_dim]. The next call overwrites them."""
        return self._gather(keys, slots, False), self._gather(values, slots, True)

    def _gather(self, tensor: torch.Tensor, slots: torch.Tensor, is_value: bool) -> torch.Tensor:
        # Reused: on CPU, page faults of a new buffer for each layer cost several times the copy.
        kind = tensor.dtype, tensor.shape[1:], is_value
        buffer = self._gathered.get(kind)
        if buffer is None or len(buffer) < len(slots):
            buffer = tensor.new_empty((len(slots) + len(slots) // 4, *tensor.shape[1:]))
            self._gathered[kind] = buffer
        return torch.index_select(tensor, 0, slots, out=buffer[: len(slots)])

    @property
    def num_layers(self) -> int:
        """Layers that have been written so far."""
        return len(self._layers)

    def move(self, moves: dict[int, int]) -> None:
        """Copy slots in all layers, at the latest before the next forward. moves: source by destination; the two may
        overlap."""
        waiting = self._moves.keys()
        if not (waiting.isdisjoint(moves) and waiting.isdisjoint(moves.values())):
            self.settle()
        self._moves.update(moves)

    def settle(self) -> None:
        """Do all moves, those of all sequences at once."""
        if not self._moves:
            return
        moves = torch.from_numpy(np.array([[*self._moves.values()], [*self._moves]])).to(self.device)
        self._moves.clear()
        source_index, index = moves
        for key, value in self._layers.values():
            key[index] = key[source_index]
            value[index] = value[source_index]
