"""Memory and time of a forward pass at best: the roofline (Williams et al. 2009) and all-reduces."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.deploy.size.hardware import GpuGroup, Precision
from cluster.deploy.size.model_shape import ModelShape

EFFICIENCY = 0.8  # share of a data sheet's rates that good kernels reach
RESERVE_GIB = 2.0  # CUDA context, communicators, captured graphs, fragmentation
_ACTIVATION_BYTES = 2  # of a number that ranks add up
_LIVE_WIDTHS = 16  # hidden sizes of activations that a row holds at once: residual, MLP, queries


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """Parts of a forward, seconds."""

    weights_s: float  # reading weights
    kv_s: float  # reading the KV cache of all sequences
    compute_s: float  # products, overlapped with reading
    all_reduce_s: float  # two a layer, not overlapped

    @property
    def total_s(self) -> float:
        return max(self.weights_s + self.kv_s, self.compute_s) + self.all_reduce_s


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model on devices, with the formats of its weights and KV cache."""

    shape: ModelShape
    group: GpuGroup
    precision: Precision
    kv_bytes: float  # of a number in the KV cache
    efficiency: float = EFFICIENCY  # in (0, 1]

    def forward_time(self, rows: int, sequences: int, context: int) -> ForwardTime:
        """A pass over `rows` tokens of `sequences` that have `context` cached tokens each. A sequence's cache is read
        once, however many of its rows are verified."""
        shape, group = self.shape, self.group
        bandwidth = group.gpu.bandwidth_tb_s * 1e12 * self.efficiency
        flops = self.precision.flops(group.gpu) * group.count * self.efficiency
        attended = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * context
        return ForwardTime(
            weights_s=shape.read_parameters(rows) * self.precision.weight_bytes / (bandwidth * group.count),
            kv_s=sequences * context * self.kv_bytes_per_token / bandwidth,
            compute_s=rows * (2.0 * shape.active_parameters + attended) / flops,
            all_reduce_s=self._all_reduces_s(rows),
        )

    @property
    def kv_bytes_per_token(self) -> float:
        """On each device. With more devices than KV heads, heads are replicated."""
        heads_of_rank = -(-self.shape.num_kv_heads // self.group.count)
        return self.shape.kv_bytes_per_token(self.kv_bytes) * heads_of_rank / self.shape.num_kv_heads

    def _all_reduces_s(self, rows: int) -> float:
        count = self.group.count
        if count == 1:
            return 0.0
        ring_bytes = 2 * (count - 1) / count * rows * self.shape.hidden_size * _ACTIVATION_BYTES
        once = self.group.all_reduce_latency_s + ring_bytes / (self.group.gpu.link_gb_s * 1e9)
        return 2 * self.shape.num_layers * once


def free_rows(placed: PlacedModel) -> float:
    """Rows of all sequences together up to which products take no longer than reading the weights."""
    shape, gpu = placed.shape, placed.group.gpu
    per_row = 2.0 * shape.active_parameters / placed.precision.flops(gpu)
    rows = 1.0
    for _ in range(32):  # with experts, more rows read more weights
        read = shape.read_parameters(max(1, int(rows))) * placed.precision.weight_bytes
        rows = read / (gpu.bandwidth_tb_s * 1e12) / per_row
    return rows


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Bytes on each device of a group."""

    weights: float
    kv_cache: float  # at the given concurrency and context
    activations: float
    reserve: float
    available: float
    room_tokens: int  # capacity of the KV cache; 0 if the weights do not fit

    @property
    def needed(self) -> float:
        return self.weights + self.kv_cache + self.activations + self.reserve

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def memory_fit(placed: PlacedModel, sequences: int, context: int, rows: int, prefill_rows: int) -> MemoryFit:
    """rows: verified in one forward, with logits; prefill_rows: prompt rows beside them."""
    shape = placed.shape
    weights = shape.num_parameters * placed.precision.weight_bytes / placed.group.count
    logits = 2 * 4 * shape.vocab_size * rows  # float32, raw and processed
    activations = 2 * _LIVE_WIDTHS * shape.hidden_size * (rows + prefill_rows) + logits
    reserve, available = RESERVE_GIB * 2**30, placed.group.gpu.memory_gib * 2**30
    left = available - weights - activations - reserve
    return MemoryFit(
        weights=weights,
        kv_cache=sequences * context * placed.kv_bytes_per_token,
        activations=activations,
        reserve=reserve,
        available=available,
        room_tokens=max(0, math.floor(left / placed.kv_bytes_per_token)),
    )
