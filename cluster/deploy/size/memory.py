"""Whether a model and the caches of its sequences fit into the memory of GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.deploy.size.roofline import PlacedModel

RESERVE_GIB = 2.0  # of a GPU: CUDA's context, communicators, captured graphs, what fragments
_LIVE_WIDTHS = 16  # of the hidden size, that a row's activations take at once: residual, MLP, queries, in two bytes


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Bytes on each GPU of a group."""

    weights: float
    kv_cache: float  # at the concurrency and context asked for
    activations: float
    reserve: float
    available: float
    room_tokens: int  # that the KV cache can hold in all; 0 where the weights alone are too large

    @property
    def needed(self) -> float:
        return self.weights + self.kv_cache + self.activations + self.reserve

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def memory_fit(placed: PlacedModel, sequences: int, context: int, rows: int, prefill_rows: int) -> MemoryFit:
    """rows: that are verified in one forward, and have logits; prefill_rows: of prompts beside them."""
    shape = placed.shape
    weights = shape.num_parameters * placed.precision.weight_bytes / placed.group.count
    # In float32, once as they come and once processed.
    logits = 2 * 4 * shape.vocab_size * rows
    activations = 2 * _LIVE_WIDTHS * shape.hidden_size * (rows + prefill_rows) + logits
    reserve = RESERVE_GIB * 2**30
    available = placed.group.gpu.memory_gib * 2**30
    left = available - weights - activations - reserve
    return MemoryFit(
        weights=weights,
        kv_cache=sequences * context * placed.kv_bytes_per_token,
        activations=activations,
        reserve=reserve,
        available=available,
        room_tokens=max(0, math.floor(left / placed.kv_bytes_per_token)),
    )
