"""Anthropic's messages: content blocks and the events that build them. A whole answer is what its events end with."""

from __future__ import annotations

import uuid
from typing import Any

from pydantic_core import from_json

from cluster.gateway.answers.chat_events import ChatEvents
from cluster.gateway.answers.piece import Piece
from cluster.gateway.answers.prepared_call import PreparedCall
from cluster.gateway.answers.totals import AnswerTotals
from cluster.gateway.door.messages_face import messages_error
from cluster.gateway.errors import ErrorStatus
from cluster.gateway.service import GenerationService
from cluster.text.tools.events import CallArguments, CallBegin, Event, Reasoning

_DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}  # by block; the member has the block's name


class MessageWriter:
    """Writes one answer: events of `begin`, of `take` for each piece, then of `end` or `fail`."""

    def __init__(self, prepared: PreparedCall, service: GenerationService) -> None:
        self._call = prepared.call
        self._events = ChatEvents(service.answer_parser(prepared))
        self._totals = AnswerTotals(prepared.num_prompt_tokens, 1, prepared.num_prediction_tokens)
        self._last_piece: Piece | None = None
        self._content: list[dict[str, Any]] = []
        self._is_open = False  # the last block grows
        self._inputs: dict[int, str] = {}  # JSON text of tool_use blocks, by index
        self._message: dict[str, Any] = {
            "id": prepared.arrival.call_id,
            "type": "message",
            "role": "assistant",
            "model": service.model.name,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    @property
    def reasoning_text(self) -> str:
        return "".join(block["thinking"] for block in self._content if block["type"] == "thinking")

    @property
    def answer(self) -> dict[str, Any]:
        return self._message

    def begin(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": {**self._message, "content": []}}]

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        self._totals.add(piece)
        self._last_piece = piece
        return [written for event in self._events.of(piece) for written in self._take(event)]

    def end(self, num_reasoning_tokens: int) -> list[dict[str, Any]]:
        written = self._close_block()
        for index, text in self._inputs.items():
            self._content[index]["input"] = _object_of(text)
        stop = self._stop()
        usage = self._usage()
        if num_reasoning_tokens:
            thinking = min(num_reasoning_tokens, self._totals.num_completion_tokens)
            usage["output_tokens_details"] = {"thinking_tokens": thinking}
        self._message |= {**stop, "usage": usage}
        delta: dict[str, Any] = {"type": "message_delta", "delta": stop, "usage": usage}
        if self._call.wants_stats:
            self._message["speculation"] = delta["speculation"] = self._totals.speculation()
        return [*written, delta, {"type": "message_stop"}]

    def fail(self, error: ErrorStatus) -> list[dict[str, Any]]:
        return [messages_error(error)]

    def _take(self, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, CallBegin):
            return self._open_block({"type": "tool_use", "id": new_tool_use_id(), "name": event.name, "input": {}})
        if isinstance(event, CallArguments):
            self._inputs[len(self._content) - 1] += event.text
            return [self._delta({"type": "input_json_delta", "partial_json": event.text})]
        kind = "thinking" if isinstance(event, Reasoning) else "text"
        written = []
        if not self._is_open or self._content[-1]["type"] != kind:
            written = self._open_block({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._content[-1][kind] += event.text
        return [*written, self._delta({"type": _DELTAS[kind], kind: event.text})]

    def _open_block(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        written = self._close_block()
        self._content.append(block)
        self._is_open = True
        index = len(self._content) - 1
        if block["type"] == "tool_use":
            self._inputs[index] = ""
        return [*written, {"type": "content_block_start", "index": index, "content_block": dict(block)}]

    def _close_block(self) -> list[dict[str, Any]]:
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self._content) - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _stop(self) -> dict[str, str | None]:
        piece = self._last_piece
        matched = None if piece is None else piece.stop_string
        reason = "end_turn"
        if piece is not None and piece.finish_reason == "length":
            reason = "max_tokens"
        elif matched is not None:
            reason = "stop_sequence"
        elif self._events.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": matched}

    def _usage(self) -> dict[str, Any]:
        """Tokens from the prefix cache are not among the input tokens."""
        cached = self._totals.num_cached_tokens
        return {
            "input_tokens": self._totals.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._totals.num_completion_tokens,
        }


def new_tool_use_id() -> str:
    return f"toolu_{uuid.uuid4().hex[:24]}"


def _object_of(text: str) -> dict[str, Any]:
    """The complete members of a JSON object whose text the end of an answer may have cut off."""
    try:
        found = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
