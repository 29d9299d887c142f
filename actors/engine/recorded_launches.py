"""Launches that are recorded once and then replayed whole: on CUDA, as graphs.

A recording reads and writes the addresses, and uses the host's numbers, of the time of recording. So all rounds of
a key must have the same inputs in the same places, and ask for the same operations.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

logger = logging.getLogger(__name__)

MOST_RECORDED = 128
_MOST_SEEN = 4096  # keys
_USES_BEFORE = 1  # it compiles kernels, which may not be done within a recording

Result = TypeVar("Result")


class Recorder(Protocol):
    def record(self, launch: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """A function that launches the same again, and the tensors that it fills. Nothing need be launched yet."""
        ...


class CudaGraphs:
    """CUDA graphs that share one pool of memory: they run one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, launch: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = launch()
        return graph.replay, result


class _Recorded(NamedTuple):
    replay: Callable[[], None]
    result: Any


class RecordedLaunches:
    """Launches by key. The first of a key run as they are; the second are recorded.

    Of recorded ones the least recently used make room for new ones; when they come again, they count as new. If one
    cannot be recorded, none is any more.
    """

    def __init__(self, recorder: Recorder, most: int = MOST_RECORDED) -> None:
        self._recorder = recorder
        self._most = most
        self._uses: OrderedDict[Hashable, int] = OrderedDict()  # of keys that are not recorded
        self._recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()
        self._has_failed = False
        self.was_new = False  # whether the last launches were not yet recorded: they took longer than the next will

    def beside(self, most: int) -> RecordedLaunches:
        """For other launches in the same memory, which never run at the same time. Failures of either are its own."""
        return RecordedLaunches(self._recorder, most)

    def run(self, key: Hashable, launch: Callable[[], Result]) -> Result:
        """What `launch` returns, in tensors that hold until the next launches of any key."""
        recorded = self._recorded.get(key)
        self.was_new = recorded is None and not self._has_failed
        if recorded is None:
            recorded = self._record(key, launch)
        if recorded is None:
            return launch()
        self._recorded.move_to_end(key)
        recorded.replay()
        result: Result = recorded.result
        return result

    def _record(self, key: Hashable, launch: Callable[[], Result]) -> _Recorded | None:
        if self._has_failed:
            return None
        uses = self._uses.pop(key, 0)
        if uses < _USES_BEFORE:
            self._uses[key] = uses + 1
            if len(self._uses) > _MOST_SEEN:
                self._uses.popitem(last=False)
            return None
        if len(self._recorded) >= self._most:
            self._recorded.popitem(last=False)
        try:
            recorded = self._recorded[key] = _Recorded(*self._recorder.record(launch))
        except Exception as error:
            self._has_failed = True
            self._recorded.clear()
            logger.warning(
                "launches are not recorded, which makes rounds slower: %s",
                (str(error).splitlines() or [type(error).__name__])[0],
            )
            return None
        return recorded
