"""Rounds are timed until the device is done, whether anything is copied back or not."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import pytest
import torch

from actors.engine.options import EngineOptions
from actors.engine.round_clock import RoundClock
from actors.engine.target_engine import TargetEngine
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem
from paceline_testing.tiny_models import make_tiny_model

FORWARD_S = 0.05


class Stream:
    """Work that a thread does in order while its launcher goes on, as a device does."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, work) -> None:
        self._work.put(work)

    def _run(self) -> None:
        while True:
            self._work.get()()


class StreamEvent:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._done = threading.Event()
        self._at = 0.0

    def record(self) -> None:
        self._stream.launch(self._reach)

    def _reach(self) -> None:
        self._at = time.perf_counter()
        self._done.set()

    def synchronize(self) -> None:
        assert self._done.wait(10.0)

    def elapsed_time(self, other: StreamEvent) -> float:
        return (other._at - self._at) * 1e3


@pytest.fixture
def engine():
    return TargetEngine(make_tiny_model("llama", vocab_size=61), EngineOptions(40, 4, True))


def prompt_round(max_rows: int) -> VerifyBatch:
    begin = SequenceStart(SamplingParams(seed=0, temperature=0.0), 8, "")
    return VerifyBatch(1, [VerifyItem(SequenceDelta(1, 0, np.ones(8, np.int32)), max_rows, begin=begin)])


def test_on_a_cpu_it_is_the_hosts_clock():
    clock = RoundClock(torch.device("cpu"))
    mark = clock.mark()
    time.sleep(0.02)
    assert 0.02 <= clock.seconds_since(mark) < 5.0


@pytest.mark.parametrize("max_rows", [4, 8], ids=["prefills only", "samples"])
def test_a_round_lasts_until_the_device_has_computed_it_though_its_launch_returns_at_once(engine, max_rows):
    stream = Stream()
    engine._clock = RoundClock(torch.device("cpu"), lambda: StreamEvent(stream))
    engine.model.register_forward_hook(lambda *_: stream.launch(lambda: time.sleep(FORWARD_S)))
    assert engine.verify(prompt_round(max_rows)).elapsed_s >= FORWARD_S


def test_a_round_on_a_cpu_is_timed_as_before(engine):
    engine.model.register_forward_hook(lambda *_: time.sleep(FORWARD_S))
    assert FORWARD_S <= engine.verify(prompt_round(4)).elapsed_s < 5.0
