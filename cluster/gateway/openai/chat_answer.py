"""OpenAI's chat completions and their chunks: content, reasoning and calls of tools."""

from __future__ import annotations

from typing import Any

from cluster.gateway.answers.chat_events import ChatEvents, new_call_id, text_of
from cluster.gateway.answers.logprobs import chat_logprobs, prompt_logprobs
from cluster.gateway.answers.piece import Piece
from cluster.gateway.answers.prepared_call import PreparedCall
from cluster.gateway.openai.answer import AnswerWriter
from cluster.gateway.requests.service_tier import tier_of_class
from cluster.gateway.service import GenerationService
from cluster.text.tools.events import CallArguments, CallBegin, Content, Event, Reasoning


class ChatWriter(AnswerWriter):
    """Chat completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, prepared: PreparedCall, service: GenerationService, fingerprint: str) -> None:
        super().__init__(prepared, service, fingerprint)
        self._head["service_tier"] = tier_of_class(prepared.requests[0].service_class)
        self._events = [ChatEvents(service.answer_parser(prepared)) for _ in prepared.requests]

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        events = self._events[piece.choice].of(piece)
        content, calls = text_of(events, Content), calls_of(events)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = calls
        if reasoning := text_of(events, Reasoning):
            message["reasoning_content"] = reasoning
        return self._choice(piece.choice, {"message": message}, self._finish_reason(piece), piece)

    def _chunk_choices(self, piece: Piece, is_first: bool) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}] if is_first else []
        deltas += [_delta(event) for event in self._events[piece.choice].of(piece)]
        has_tokens = bool(piece.token_ids or piece.scores or piece.token_sources)
        if len(deltas) == is_first and (has_tokens or piece.finish_reason is not None):
            deltas.append({})
        choices = [self._choice(piece.choice, {"delta": delta}, None) for delta in deltas]
        if len(deltas) > is_first:
            choices[-1] = self._choice(piece.choice, {"delta": deltas[-1]}, self._finish_reason(piece), piece)
        return choices

    def _finish_reason(self, piece: Piece) -> str | None:
        return self._events[piece.choice].finish_reason(piece, self._prepared.call.tool_use)

    def _logprobs(self, tokens: Piece) -> dict[str, Any]:
        return chat_logprobs(tokens.scores, self._strings)

    def _of_prompt(self, piece: Piece) -> dict[str, Any]:
        """A chat has one prompt."""
        members: dict[str, Any] = {}
        if self._prepared.call.wants_token_ids:
            members["prompt_token_ids"] = self._prepared.requests[0].prompt_token_ids.tolist()
        if self._prepared.call.prompt_logprobs is not None:
            members["prompt_logprobs"] = prompt_logprobs(piece.prompt_scores, self._strings)
        return members


def calls_of(events: list[Event]) -> list[dict[str, Any]]:
    """The calls of a whole answer, as OpenAI's objects."""
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append({"id": new_call_id(), "type": "function", "function": {"name": event.name, "arguments": ""}})
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.text
    return calls


def _delta(event: Event) -> dict[str, Any]:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, CallBegin):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": new_call_id(), "type": "function", "function": function}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
