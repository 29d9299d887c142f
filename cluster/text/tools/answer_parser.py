"""Reads a whole answer: what the model thinks first, then text and calls."""

from __future__ import annotations

from cluster.text.tools.events import Content, Event
from cluster.text.tools.format import ToolParser
from cluster.text.tools.reasoning import ReasoningSplitter


class AnswerParser:
    """A ToolParser. splitter, parser: None, if the model does not think, or has no tools."""

    def __init__(self, splitter: ReasoningSplitter | None, parser: ToolParser | None) -> None:
        self._splitter = splitter
        self._parser = parser

    def push(self, text: str) -> list[Event]:
        return self._answered(self._splitter.push(text) if self._splitter else [Content(text)])

    def finish(self) -> list[Event]:
        events = self._answered(self._splitter.finish() if self._splitter else [])
        return events + (self._parser.finish() if self._parser else [])

    def _answered(self, events: list[Event]) -> list[Event]:
        if self._parser is None:
            return events
        answered: list[Event] = []
        for event in events:
            answered += self._parser.push(event.text) if isinstance(event, Content) else [event]
        return answered
