"""Brings the results of rounds from a device to the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


class HostCopy:
    """On CUDA, results are copied into one pinned buffer, which grows as needed."""

    def __init__(self, device: torch.device, wait: Callable[[], object] | None = None) -> None:
        """wait: returns when the device has copied. None: CUDA's, and none on other devices, whose copies block."""
        if wait is None and device.type == "cuda":
            wait = lambda: torch.cuda.current_stream(device).synchronize()  # noqa: E731
        self._wait = wait
        self._buffer = torch.empty(0, dtype=torch.int64)

    @torch.inference_mode()
    def read(self, result: torch.Tensor) -> np.ndarray:
        """The numbers of a result, int64 [n]. Waits for the device. They hold until the next call."""
        if self._wait is None:
            return result.cpu().numpy()
        if len(result) > len(self._buffer):
            size = 1 << (len(result) - 1).bit_length()
            self._buffer = torch.zeros(size, dtype=torch.int64, pin_memory=result.is_cuda)
        host = self._buffer[: len(result)]
        host.copy_(result, non_blocking=True)
        self._wait()
        return host.numpy()
