"""Times rounds as the device sees them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, Self

import torch

from actors.engine.device_event import CudaEvent


class Event(Protocol):
    """A point in the work of a device, as `CudaEvent`."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        """Whether the device has come to it."""
        ...

    def elapsed_time(self, other: Self, /) -> float:
        """Milliseconds."""
        ...


class RoundClock:
    """Seconds from a mark until the device has done what was launched since.

    A launch returns before the device has computed, so the host's clock says little about a round whose results are not
    copied back, such as one that only prefills. On accelerators, events are recorded between the launches.
    """

    def __init__(self, device: torch.device, new_event: Callable[[], Event] | None = None) -> None:
        """new_event: how to make an event that measures time. None: CUDA's where the device is a GPU."""
        if new_event is None and device.type == "cuda":
            new_event = lambda: CudaEvent(device, enable_timing=True)  # noqa: E731
        self._new_event = new_event

    @property
    def is_of_device(self) -> bool:
        """Whether marks are points in the work of a device, and not times of the host."""
        return self._new_event is not None

    def mark(self) -> Event | float:
        if self._new_event is None:
            return time.perf_counter()
        event = self._new_event()
        event.record()
        return event

    def seconds_since(self, mark: Event | float) -> float:
        """Waits until the device has done all that was launched.

        After a round that samples, it has: its tokens were copied back. For a round that only prefills, the wait costs
        the overlap with the router's planning of the next one. Without it, the next round would queue behind this one.
        """
        return seconds_between(mark, self.mark())


def seconds_between(mark: Event | float, end: Event | float) -> float:
    """Waits until the device has come to `end`."""
    if isinstance(mark, float):
        assert isinstance(end, float)
        return end - mark
    assert not isinstance(end, float)
    end.synchronize()
    return mark.elapsed_time(end) / 1e3
