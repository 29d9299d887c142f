"""How much of a GPU's memory the KV cache of an engine gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actors.engine.recorded_launches import MOST_RECORDED
from actors.errors import ModelError

_GRAPH_BYTES = 4 << 20  # estimate: memory of a recorded round in addition to its tensors
_PROCESS_BYTES = 1 << 30  # context, kernels and communicators of one process, which torch does not count


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of a GPU once an engine has loaded its model and run its largest round."""

    total: int
    free: int  # now, with nothing but the weights left of the engine
    weights: int
    peak: int  # of the largest round, beyond weights and KV cache
    recorded: int = 0  # additional bytes that recorded rounds will keep

    def for_kv_cache(self, limit: float, share: float = 1.0) -> int:
        """Bytes that are left for the KV cache.

        limit: how much of the memory may be used. share: of the GPU, that this process has. With a share of 1, whatever
        is in use stays so. With less, others have the rest, whether they have taken it yet or not, so that it does not
        matter who starts first. Raises ModelError if less is free, because others have taken more than their share.
        """
        allowed = int(limit * share * self.total)
        in_use = self.total - self.free if share == 1.0 else self.weights + _PROCESS_BYTES
        for_rounds = self.peak + self.recorded
        left = allowed - in_use - for_rounds
        if left > self.free - for_rounds:
            raise ModelError(
                f"{_gib(self.free)} of this GPU's {_gib(self.total)} are free, and {_gib(left + for_rounds)} are "
                f"needed for a share of {share:g}; other processes use more than theirs"
            )
        return left


class GpuMeter:
    """Reads the memory of an accelerator. To be made before anything of an engine is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._allocated()

    def start(self) -> None:
        """Begin to measure a peak."""
        torch.accelerator.reset_peak_memory_stats(self._device)

    def read(self, kv_bytes: int, will_record: bool = False) -> GpuMemory:
        """kv_bytes: of the KV cache that was there during the peak, and is not any more.

        will_record: whether rounds will be recorded. These work in memory that nothing else gets. They share it, and
        have fewer rows than the largest round, so that they need no more than that.
        """
        torch.accelerator.empty_cache()
        free, total = torch.accelerator.get_memory_info(self._device)
        now = self._allocated()
        peak = torch.accelerator.max_memory_allocated(self._device) - now - kv_bytes
        peak = max(0, peak)
        recorded = peak + MOST_RECORDED * _GRAPH_BYTES if will_record else 0
        return GpuMemory(total, free, now - self._before, peak, recorded)

    def _allocated(self) -> int:
        return torch.accelerator.memory_allocated(self._device)


def gpu_meter(device: str) -> GpuMeter | None:
    """None where the KV cache is in a host's memory."""
    return GpuMeter(torch.device(device)) if device.startswith("cuda") else None


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
