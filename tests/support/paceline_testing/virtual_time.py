"""An event loop whose time jumps to the next timer whenever nothing else is to be done."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jumping(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0.0)
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """For work that waits for timers and for itself alone."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
