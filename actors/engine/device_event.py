"""Events of a device that need not be the current one."""

from __future__ import annotations

import torch


class CudaEvent:
    """A point in the work of one GPU: recorded on that GPU's current stream, whichever GPU is current. torch's own
    events are recorded on the stream of the current GPU."""

    def __init__(self, device: torch.device, *, enable_timing: bool = False) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=enable_timing)

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        """Wait until the GPU has come to where `record` was called last."""
        self._event.synchronize()

    def query(self) -> bool:
        """Whether the GPU has come to it."""
        return bool(self._event.query())

    def elapsed_time(self, other: CudaEvent, /) -> float:
        """Milliseconds."""
        return float(self._event.elapsed_time(other._event))
