"""Makes a parser of a generator that reads an answer from beginning to end."""

from __future__ import annotations

from collections.abc import Callable

from cluster.text.tools.events import Event
from cluster.text.tools.output import Output
from cluster.text.tools.reader import Reader, Steps


class SteppedParser:
    def __init__(self, read_answer: Callable[[Reader, Output], Steps[None]]) -> None:
        self._reader = Reader()
        self._output = Output()
        self._steps = read_answer(self._reader, self._output)
        next(self._steps, None)

    def push(self, text: str) -> list[Event]:
        self._reader.add(text)
        next(self._steps, None)
        return self._output.take()

    def finish(self) -> list[Event]:
        self._reader.end()
        next(self._steps, None)
        self._output.finish()
        return self._output.take()
