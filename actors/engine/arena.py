"""Brings the arrays of a round to a device in one copy."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from actors.engine.device_event import CudaEvent

ALIGNMENT = 16  # bytes; kernels load aligned arrays in wide words
# Recorded launches hold only as long as the buffer, so that on a GPU it has room for nearly every round.
_FIRST_BYTES = {"cuda": 4 << 20, "cpu": 1 << 16}
_MOST_LAYOUTS = 1024

Seen = TypeVar("Seen")


class Views:
    """The arrays on the device that written words hold: offsets in bytes, types and shapes. Equal to no other."""

    def __init__(self, views: Sequences[tuple[int, type[np.generic], tuple[int, ...]]]) -> None:
        self.views = views


class Part(NamedTuple):
    """An array in the corner of a larger one, whose further elements are `fill`."""

    array: np.ndarray
    shape: tuple[int, ...]
    fill: int = 0
    following: np.ndarray | None = None  # comes right after the array, which is 1-D


class Written(NamedTuple):
    """int64 words that a function writes directly into the send buffer, over those of an earlier round."""

    num_words: int
    views: Views
    write: Callable[[np.ndarray], object]  # gets int64 [num_words]


class CopyEvent(Protocol):
    """As `torch.Event`."""

    def record(self) -> None: ...

    def synchronize(self) -> None:
        """Wait until the device has come to where `record` was called last."""
        ...


_Key = tuple[int, Views, tuple[tuple[tuple[int, ...], str], ...]]


@dataclass(slots=True)
class _Layout:
    used: torch.Tensor  # bytes of the host's buffer
    used_on_device: torch.Tensor
    written: np.ndarray  # int64
    host: list[np.ndarray]  # the parts
    device: list[torch.Tensor]
    seen: Any = None


class Arena:
    """A buffer on the host, pinned for CUDA, and one on the device. Arrays of the same shapes and dtypes have the same
    addresses each time, as long as `generation` stays."""

    def __init__(self, device: torch.device, copied: CopyEvent | None = None) -> None:
        """copied: event after which the device has read the host's buffer; None: a CUDA event, or none on devices where
        copies are synchronous."""
        self._device = device
        self._copied = CudaEvent(device) if copied is None and device.type == "cuda" else copied
        self.generation = -1  # of the buffers: larger ones replace them; the first are generation 0
        self._allocate(_FIRST_BYTES.get(device.type, _FIRST_BYTES["cpu"]))

    def _allocate(self, num_bytes: int) -> None:
        """Replace both buffers; neither, if there is no memory for both."""
        is_pinned = self._device.type == "cuda"
        host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self.generation += 1
        self._host, self._on_device = host, on_device
        self._layouts: dict[_Key, _Layout] = {}

    def send(self, written: Written, parts: Sequences[Part], see: Callable[[list[torch.Tensor]], Seen]) -> Seen:
        """What `see` makes of the arrays on the device, once for all of the same shapes: those of `written`, then the
        parts, in order. They hold until the next call, before which the device must have read them."""
        key = written.num_words, written.views, tuple([(shape, array.dtype.char) for array, shape, _, _ in parts])
        if self._copied is not None:
            self._copied.synchronize()  # a copy of before may still be queued; after a round that was read, it is not
        layout = self._layouts.get(key) or self._lay_out(key)
        written.write(layout.written)
        for (array, shape, fill, following), place in zip(parts, layout.host, strict=True):
            if array.shape == shape:
                place[:] = array
            elif len(shape) == 1:
                count = len(array)
                place[:count] = array
                if following is not None:  # nothing reads what comes after it
                    place[count : count + len(following)] = following
                elif count < shape[0]:
                    place[count:] = fill
            else:
                place.fill(fill)
                place[tuple([slice(size) for size in array.shape])] = array
        layout.used_on_device.copy_(layout.used, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if layout.seen is None:
            layout.seen = see(layout.device)
        seen: Seen = layout.seen
        return seen

    def _lay_out(self, key: _Key) -> _Layout:
        num_words, views, parts = key
        sizes = [8 * num_words, *[math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in parts]]
        ends = np.cumsum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]).tolist()
        if ends[-1] > len(self._host):
            self._allocate(1 << (ends[-1] - 1).bit_length())
        host, device = [], [self._on_device_at(*view) for view in views.views]
        for (shape, dtype), size, begin in zip(parts, sizes[1:], ends[:-1], strict=True):
            host.append(self._host[begin : begin + size].numpy().view(dtype).reshape(shape))
            device.append(self._on_device_at(begin, np.dtype(dtype).type, shape))
        written = self._host[: sizes[0]].numpy().view(np.int64)
        if len(self._layouts) >= _MOST_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]  # the oldest; laid out again, it has the same places
        layout = _Layout(self._host[: ends[-1]], self._on_device[: ends[-1]], written, host, device)
        self._layouts[key] = layout
        return layout

    def _on_device_at(self, offset: int, kind: type[np.generic], shape: tuple[int, ...]) -> torch.Tensor:
        dtype = torch.from_numpy(np.empty(0, kind)).dtype
        num_bytes = math.prod(shape) * np.dtype(kind).itemsize
        return self._on_device[offset : offset + num_bytes].view(dtype).view(shape)
