"""What the text of a chat's answer says: content, reasoning and calls of tools, for every API."""

from __future__ import annotations

import uuid

from cluster.gateway.answers.piece import Piece
from cluster.text.chat_format import ToolUse
from cluster.text.tools.answer_parser import AnswerParser
from cluster.text.tools.events import CallBegin, Content, Event, Reasoning
from cluster.text.tools.tool import NamedFunction


class ChatEvents:
    """What the text of one answer says, piece by piece."""

    def __init__(self, parser: AnswerParser | None) -> None:
        self._parser = parser
        self.has_calls = False

    def finish_reason(self, piece: Piece, use: ToolUse) -> str | None:
        """tool_calls, if the model chose to call; a call of a function that the request names ends with stop, as
        OpenAI's do."""
        if piece.finish_reason == "stop" and self.has_calls and not isinstance(use.choice, NamedFunction):
            return "tool_calls"
        return piece.finish_reason

    def of(self, piece: Piece) -> list[Event]:
        if self._parser is None:
            return [Content(piece.text)] if piece.text else []
        events = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            events += self._parser.finish()
        self.has_calls = self.has_calls or any(isinstance(event, CallBegin) for event in events)
        return events


def text_of(events: list[Event], kind: type[Content] | type[Reasoning]) -> str:
    return "".join([event.text for event in events if isinstance(event, kind)])


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
