"""Collects the events of an answer."""

from __future__ import annotations

from cluster.text.tools.events import CallArguments, CallBegin, Content, Event, Reasoning

_MAX_HELD_SPACES = 256


class Output:
    """Joins neighbouring pieces, and leaves out white space between, before and after calls."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._num_calls = 0
        self._spaces: str | None = ""  # at the beginning or after a call; None: other content has come since

    def content(self, text: str) -> None:
        if not text:
            return
        if self._spaces is None:
            self._add_content(text)
            return
        self._spaces += text
        if len(self._spaces) > _MAX_HELD_SPACES or not self._spaces.isspace():
            text, self._spaces = self._spaces, None
            self._add_content(text)

    def reasoning(self, text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Reasoning):
            self._events[-1] = Reasoning(last.text + text)
        elif text:
            self._events.append(Reasoning(text))

    def begin_call(self, name: str) -> None:
        self._events.append(CallBegin(self._num_calls, name))
        self._num_calls += 1
        self._spaces = ""

    def arguments(self, text: str) -> None:
        """Appends to the call that has begun last."""
        last = self._events[-1] if self._events else None
        if isinstance(last, CallArguments):
            self._events[-1] = CallArguments(last.index, last.text + text)
        elif text:
            self._events.append(CallArguments(self._num_calls - 1, text))

    def finish(self) -> None:
        if self._spaces and not self._num_calls:
            self._add_content(self._spaces)
        self._spaces = None

    def take(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def _add_content(self, text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Content):
            self._events[-1] = Content(last.text + text)
        elif text:
            self._events.append(Content(text))
