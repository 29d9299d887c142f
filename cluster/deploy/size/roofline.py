"""How long one forward pass takes at best on real hardware (Williams et al. 2009, the roofline, and all-reduces)."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.deploy.size.hardware import GpuGroup
from cluster.deploy.size.model_shape import ModelShape
from cluster.deploy.size.precision import Precision

EFFICIENCY = 0.8  # of the data sheet's bandwidth and operations that good kernels reach
_ACTIVATION_BYTES = 2  # of a number that ranks add up


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """Where the time of one forward goes, seconds."""

    weights_s: float  # to read them
    kv_s: float  # to read the cache of all sequences
    compute_s: float  # to multiply, meanwhile
    all_reduce_s: float  # two a layer, after which the next products wait

    @property
    def total_s(self) -> float:
        return max(self.weights_s + self.kv_s, self.compute_s) + self.all_reduce_s


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model on GPUs, with weights and KV cache in some precision."""

    shape: ModelShape
    group: GpuGroup
    precision: Precision
    kv_bytes: float  # of one number in the KV cache
    efficiency: float = EFFICIENCY  # above 0, at most 1

    def forward_time(self, rows: int, sequences: int, context: int) -> ForwardTime:
        """One pass over `rows` tokens in all, of `sequences` whose cache holds `context` tokens each.

        A sequence's cache is read once, however many rows of it are verified.
        """
        shape, group = self.shape, self.group
        bandwidth = group.gpu.bandwidth_tb_s * 1e12 * self.efficiency
        flops = self.precision.flops(group.gpu) * group.count * self.efficiency
        attended = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * context  # scores and their sum of values
        return ForwardTime(
            weights_s=shape.read_parameters(rows) * self.precision.weight_bytes / (bandwidth * group.count),
            kv_s=sequences * context * self.kv_bytes_per_token / bandwidth,
            compute_s=rows * (2.0 * shape.active_parameters + attended) / flops,
            all_reduce_s=self._all_reduces_s(rows),
        )

    @property
    def kv_bytes_per_token(self) -> float:
        """On each GPU. Heads are not split: with more GPUs than heads some are kept several times."""
        shape = self.shape
        of_rank = -(-shape.num_kv_heads // self.group.count)
        return shape.kv_bytes_per_token(self.kv_bytes) * of_rank / shape.num_kv_heads

    def _all_reduces_s(self, rows: int) -> float:
        count = self.group.count
        if count == 1:
            return 0.0
        passed = 2 * (count - 1) / count * rows * self.shape.hidden_size * _ACTIVATION_BYTES  # by each GPU, in a ring
        once = self.group.all_reduce_latency_s + passed / (self.group.gpu.link_gb_s * 1e9)
        return 2 * self.shape.num_layers * once


def free_rows(placed: PlacedModel) -> float:
    """Rows, all sequences together, until products take as long as reading the weights for them: so many are verified
    for the price of one."""
    shape, gpu = placed.shape, placed.group.gpu
    per_row = 2.0 * shape.active_parameters / placed.precision.flops(gpu)
    rows = 1.0
    for _ in range(32):  # with experts, more rows read more weights
        read = shape.read_parameters(max(1, int(rows))) * placed.precision.weight_bytes
        rows = read / (gpu.bandwidth_tb_s * 1e12) / per_row
    return rows
