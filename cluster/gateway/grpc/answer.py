"""Answers of the gRPC API: text, reasoning, calls and log-probabilities, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cluster.gateway.answers.chat_events import ChatEvents, new_call_id, text_of
from cluster.gateway.answers.logprobs import TokenScore
from cluster.gateway.answers.piece import Piece, TokenSource, joined_by_choice
from cluster.gateway.answers.prepared_call import PreparedCall
from cluster.gateway.answers.totals import AnswerTotals
from cluster.gateway.paceline.v1 import inference_pb2
from cluster.gateway.service import GenerationService
from cluster.text.token_strings import TokenStrings
from cluster.text.tools.events import CallArguments, CallBegin, Content, Event, Reasoning

_FINISH_REASONS = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
    "tool_calls": inference_pb2.FINISH_REASON_TOOL_CALLS,
}


class GrpcAnswer:
    """Writes a call's answers, as one response or as chunks."""

    def __init__(self, prepared: PreparedCall, service: GenerationService) -> None:
        self._prepared = prepared
        self._strings = service.token_strings
        self._head: dict[str, Any] = {"id": prepared.arrival.call_id, "model": service.model.name}
        self._events = [
            ChatEvents(service.answer_parser(prepared) if prepared.call.is_chat else None) for _ in prepared.requests
        ]
        self._totals = AnswerTotals(prepared.num_prompt_tokens, prepared.call.n, prepared.num_prediction_tokens)
        self._num_open = len(prepared.requests)
        self._num_chunks = 0

    def whole(self, pieces: Sequence[Piece]) -> inference_pb2.GenerateResponse:
        for piece in pieces:
            self._totals.add(piece)
        first, *others = joined_by_choice(pieces)
        return inference_pb2.GenerateResponse(
            **self._head,
            **self._answer(first),
            prompt_token_ids=self._prompt_ids(),
            prompt_logprobs=self._logprobs(first.prompt_scores),
            others=[inference_pb2.GenerateResponse(**self._answer(piece)) for piece in others],
            **self._sums(),
        )

    def _answer(self, piece: Piece) -> dict[str, Any]:
        """Fields about one answer. piece: all of it."""
        events = self._events[piece.choice].of(piece)
        return {**self._common(piece, events), "tool_calls": _calls(_deltas(events))}

    def chunk(self, piece: Piece) -> inference_pb2.GenerateChunk | None:
        """None: the piece is held back, since it may be the beginning of a call."""
        self._totals.add(piece)
        self._num_open -= piece.finish_reason is not None
        events = self._events[piece.choice].of(piece)
        has_tokens = bool(piece.token_ids or piece.scores or piece.prompt_scores or piece.token_sources)
        if not (events or has_tokens or piece.finish_reason is not None):
            return None
        number, self._num_chunks = self._num_chunks, self._num_chunks + 1
        return inference_pb2.GenerateChunk(
            **self._head,
            **self._common(piece, events),
            sequence_number=number,
            tool_calls=_deltas(events),
            prompt_token_ids=() if number else self._prompt_ids(),
            prompt_logprobs=() if number else self._logprobs(piece.prompt_scores),
            **({} if self._num_open else self._sums()),
        )

    def _common(self, piece: Piece, events: list[Event]) -> dict[str, Any]:
        """Fields of an answer and of a chunk that have the same name and type in both."""
        reason = self._events[piece.choice].finish_reason(piece, self._prepared.call.tool_use)
        return {
            "index": piece.choice,
            "text": text_of(events, Content),
            "reasoning": text_of(events, Reasoning),
            "token_ids": piece.token_ids,
            "logprobs": self._logprobs(piece.scores),
            "token_sources": map(_source, piece.token_sources),
            "finish_reason": _FINISH_REASONS[reason],
        }

    def _prompt_ids(self) -> list[int]:
        prepared = self._prepared
        return prepared.requests[0].prompt_token_ids.tolist() if prepared.call.wants_token_ids else []

    def _logprobs(self, scores: Iterable[TokenScore]) -> list[inference_pb2.TokenLogprob]:
        return [_logprob(score, self._strings) for score in scores]

    def _sums(self) -> dict[str, Any]:
        """Fields about all answers, after the last piece."""
        usage = self._totals.usage()
        sums: dict[str, Any] = {
            "usage": inference_pb2.Usage(
                prompt_tokens=usage["prompt_tokens"],
                completion_tokens=usage["completion_tokens"],
                total_tokens=usage["total_tokens"],
                **usage["prompt_tokens_details"],
                **usage.get("completion_tokens_details", {}),
            ),
        }
        if self._prepared.call.wants_stats:
            sums["speculation"] = inference_pb2.SpeculationStats(**self._totals.speculation())
        return sums


def _deltas(events: Iterable[Event]) -> list[inference_pb2.ToolCallDelta]:
    deltas = []
    for event in events:
        if isinstance(event, CallBegin):
            deltas.append(inference_pb2.ToolCallDelta(index=event.index, id=new_call_id(), name=event.name))
        elif isinstance(event, CallArguments):
            deltas.append(inference_pb2.ToolCallDelta(index=event.index, arguments=event.text))
    return deltas


def _calls(deltas: Iterable[inference_pb2.ToolCallDelta]) -> list[inference_pb2.ToolCall]:
    calls: list[inference_pb2.ToolCall] = []
    for delta in deltas:
        if delta.id:
            calls.append(inference_pb2.ToolCall(id=delta.id, name=delta.name))
        calls[delta.index].arguments += delta.arguments
    return calls


def _source(pair: TokenSource) -> inference_pb2.TokenSource:
    text, source = pair
    return inference_pb2.TokenSource(text=text, source=source)


def _logprob(score: TokenScore, strings: TokenStrings) -> inference_pb2.TokenLogprob:
    top = [
        inference_pb2.TopLogprob(token_id=token_id, text=strings.bytes_of(token_id), logprob=logprob)
        for token_id, logprob in score.top
    ]
    return inference_pb2.TokenLogprob(
        token_id=score.token_id, text=strings.bytes_of(score.token_id), logprob=score.logprob, top=top
    )
