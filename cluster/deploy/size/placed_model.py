"""A model on devices: its memory, and the time of a forward by the roofline (Williams et al. 2009)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cluster.config import MOST_PREFILL_ROWS
from cluster.deploy.size.hardware import Gpu
from cluster.deploy.size.model_shape import ModelShape

CPU = "cpu"  # the name of this machine's CPU among devices
EFFICIENCY = 0.8  # share of a data sheet's rates that good kernels reach
# Bytes of a weight or number. int4: 4 bits, and a scale with an offset, in float16, for each group of 32.
NUM_BYTES: Mapping[str, float] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1, "int4": 0.625}
QUANTIZED = ("fp8", "int8", "int4")  # target.quantization
_PREFILL_ROWS = MOST_PREFILL_ROWS
_RESERVE_BYTES = 2.0 * 2**30  # CUDA context, communicators, captured graphs, fragmentation
_ALL_REDUCE_US_PER_GPU = 0.5  # on top of the link's own latency
_ACTIVATION_BYTES = 2
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
class MemoryFit:
    """Bytes on each device of a group."""

    weights: float
    kv_cache: float  # at the given concurrency and context
    activations: float
    reserve: float
    available: float
    room_tokens: int  # capacity of the KV cache; 0 if the weights do not fit
    needed: float

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """A model on devices of one node, which share it by tensor parallelism."""

    shape: ModelShape
    device: str  # its name
    gpu: Gpu
    count: int
    dtype: str  # weights
    kv_dtype: str = "auto"  # auto: float32 with weights in float32, otherwise two bytes a number
    efficiency: float = EFFICIENCY  # in (0, 1]

    @property
    def weight_bytes(self) -> float:
        return NUM_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> float:
        """On each device. With more devices than KV heads, heads are replicated."""
        auto = "float32" if self.dtype == "float32" else "bfloat16"
        number_bytes = NUM_BYTES[auto if self.kv_dtype == "auto" else self.kv_dtype]
        heads_of_rank = -(-self.shape.num_kv_heads // self.count)
        return self.shape.kv_bytes_per_token(number_bytes) * heads_of_rank / self.shape.num_kv_heads

    def forward_time(self, rows: int, sequences: int, context: int) -> ForwardTime:
        """A pass over `rows` tokens of `sequences` that have `context` cached tokens each. A sequence's cache is read
        once, however many of its rows are verified."""
        shape, gpu, count = self.shape, self.gpu, self.count
        bandwidth = gpu.bandwidth_tb_s * 1e12 * self.efficiency
        attended = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * context
        operations = rows * (2.0 * shape.active_parameters + attended)
        all_reduce_s = 0.0
        if count > 1:
            ring_bytes = 2 * (count - 1) / count * rows * shape.hidden_size * _ACTIVATION_BYTES
            latency_s = (gpu.link_latency_us + _ALL_REDUCE_US_PER_GPU * count) * 1e-6
            all_reduce_s = 2 * shape.num_layers * (latency_s + ring_bytes / (gpu.link_gb_s * 1e9))
        return ForwardTime(
            weights_s=shape.read_parameters(rows) * self.weight_bytes / (bandwidth * count),
            kv_s=sequences * context * self.kv_bytes_per_token / bandwidth,
            compute_s=operations / (gpu.flops(self.dtype) * count * self.efficiency),
            all_reduce_s=all_reduce_s,
        )

    def free_rows(self) -> float:
        """Rows of all sequences together up to which products take no longer than reading the weights."""
        per_row = 2.0 * self.shape.active_parameters / self.gpu.flops(self.dtype)
        rows = 1.0
        for _ in range(32):  # with experts, more rows read more weights
            read = self.shape.read_parameters(max(1, int(rows))) * self.weight_bytes
            rows = read / (self.gpu.bandwidth_tb_s * 1e12) / per_row
        return rows

    def memory(self, rows: int, sequences: int, context: int, head: PlacedModel | None = None) -> MemoryFit:
        """rows: verified in one forward, with logits, beside the prompt rows of a round. head: whole on each device."""
        weights = self.shape.num_parameters * self.weight_bytes / self.count
        kv_bytes_per_token = self.kv_bytes_per_token
        if head is not None:
            weights += head.shape.num_parameters * head.weight_bytes
            kv_bytes_per_token += head.kv_bytes_per_token
        logits = 2 * 4 * self.shape.vocab_size * rows  # float32, raw and processed
        hidden = self.shape.hidden_size * (rows + _PREFILL_ROWS)
        activations = _ACTIVATION_BYTES * _LIVE_WIDTHS * hidden + logits
        kv_cache = sequences * context * kv_bytes_per_token
        available = self.gpu.memory_gib * 2**30
        left = available - weights - activations - _RESERVE_BYTES
        return MemoryFit(
            weights=weights,
            kv_cache=kv_cache,
            activations=activations,
            reserve=_RESERVE_BYTES,
            available=available,
            room_tokens=max(0, math.floor(left / kv_bytes_per_token)),
            needed=weights + kv_cache + activations + _RESERVE_BYTES,
        )
