"""OpenAI's answer objects, as plain dicts: text completions and their chunks, and the base of chat completions."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from cluster.gateway.answers.likeliest import likeliest
from cluster.gateway.answers.logprobs import TextOffsets, completion_logprobs, prompt_logprobs
from cluster.gateway.answers.piece import Piece, joined_by_choice
from cluster.gateway.answers.prepared_call import PreparedCall
from cluster.gateway.answers.totals import AnswerTotals
from cluster.gateway.requests.schema import UsageChunks
from cluster.gateway.service import GenerationService


class AnswerWriter(ABC):
    """Writes one call's answer, whole or in chunks with the same id, time and model."""

    kind: str  # of the object that is a whole answer
    chunk_kind: str

    def __init__(self, prepared: PreparedCall, service: GenerationService, fingerprint: str) -> None:
        self._prepared = prepared
        self._strings = service.token_strings
        self._head = {"id": prepared.arrival.call_id, "created": int(time.time()), "model": service.model.name}
        self._fingerprint = fingerprint
        self._open_choices = len(prepared.requests)
        self._begun: set[int] = set()
        self.totals = AnswerTotals(prepared.num_prompt_tokens, prepared.call.n, prepared.num_prediction_tokens)

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        for piece in pieces:
            self.totals.add(piece)
        wholes = joined_by_choice(pieces)
        given = likeliest(wholes, self._prepared.call)
        choices = [{**self._whole_choice(whole), "index": index} for index, whole in enumerate(given)]
        answer = self._object(self.kind, choices)
        answer |= self._of_prompt(wholes[0])
        answer["usage"] = self.totals.usage()
        if self._prepared.call.wants_stats:
            answer["speculation"] = self.totals.speculation()
        return answer

    def chunks(self, piece: Piece, usage: UsageChunks) -> list[dict[str, Any]]:
        """The chunks for a piece; after the last piece of the call also the usage chunk, if wanted. There may be none:
        text is held back that may be the beginning of a call."""
        self.totals.add(piece)
        is_first = piece.choice not in self._begun
        self._begun.add(piece.choice)
        written = [self._object(self.chunk_kind, [choice]) for choice in self._chunk_choices(piece, is_first)]
        if is_first and written:
            written[0] |= self._of_prompt(piece)
        if piece.finish_reason is not None:
            self._open_choices -= 1
        if usage != "none":
            for chunk in written:
                chunk["usage"] = self.totals.usage() if usage == "every" else None
        if self._open_choices == 0:
            if usage != "none":
                written.append(self._object(self.chunk_kind, []))
                written[-1]["usage"] = self.totals.usage()
            if self._prepared.call.wants_stats:
                written[-1]["speculation"] = self.totals.speculation()
        return written

    @abstractmethod
    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        """piece: the whole answer."""

    @abstractmethod
    def _chunk_choices(self, piece: Piece, is_first: bool) -> list[dict[str, Any]]:
        """One choice for each chunk. is_first: of its answer."""

    def _of_prompt(self, piece: Piece) -> dict[str, Any]:
        """Members of the answer itself, or of its first chunk, about the prompt. piece: the first of a choice."""
        return {}

    def _choice(
        self, index: int, said: dict[str, Any], finish_reason: str | None, tokens: Piece | None = None
    ) -> dict[str, Any]:
        """tokens: those of the choice, if it has any."""
        call = self._prepared.call
        logprobs = None if tokens is None or call.options.logprobs is None else self._logprobs(tokens)
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        if call.wants_token_sources:
            choice["token_sources"] = [] if tokens is None else tokens.token_sources
        if call.wants_token_ids and tokens is not None:
            choice["token_ids"] = list(tokens.token_ids)
        return choice

    @abstractmethod
    def _logprobs(self, tokens: Piece) -> dict[str, Any]: ...

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "system_fingerprint": self._fingerprint, "choices": choices}


class CompletionWriter(AnswerWriter):
    """Text completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, prepared: PreparedCall, service: GenerationService, fingerprint: str) -> None:
        super().__init__(prepared, service, fingerprint)
        self._offsets = [TextOffsets() for _ in prepared.requests]

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        (choice,) = self._chunk_choices(piece, is_first=True)
        return choice

    def _chunk_choices(self, piece: Piece, is_first: bool) -> list[dict[str, Any]]:
        choice = self._choice(piece.choice, {"text": piece.text}, piece.finish_reason, piece)
        if is_first and self._prepared.call.wants_token_ids:
            choice["prompt_token_ids"] = self._prepared.requests[piece.choice].prompt_token_ids.tolist()
        if self._prepared.call.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(piece.prompt_scores, self._strings)
        return [choice]

    def _logprobs(self, tokens: Piece) -> dict[str, Any]:
        return completion_logprobs(tokens.scores, self._strings, self._offsets[tokens.choice])
