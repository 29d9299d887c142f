"""Which stream an event is recorded on."""

from __future__ import annotations

from typing import ClassVar

import torch

from actors.engine.arena import Arena
from actors.engine.device_event import CudaEvent
from actors.engine.round_clock import RoundClock


class _FakeEvent:
    recorded: ClassVar[list[object]] = []

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: object) -> None:
        self.recorded.append(stream)


def test_events_are_recorded_on_the_stream_of_their_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", _FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    _FakeEvent.recorded.clear()
    CudaEvent(torch.device("cuda:1")).record()
    RoundClock(torch.device("cuda:2")).mark()
    assert _FakeEvent.recorded == ["stream of cuda:1", "stream of cuda:2"]


def test_arenas_and_clocks_of_gpus_have_such_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", _FakeEvent)
    monkeypatch.setattr(Arena, "_allocate", lambda self, num_bytes: None)
    assert isinstance(Arena(torch.device("cuda:1"))._copied, CudaEvent)
    assert RoundClock(torch.device("cuda:1")).is_of_device
    assert not RoundClock(torch.device("cpu")).is_of_device
