"""OpenAI's answer objects, as plain dicts: completions, chat completions, and their chunks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from actors.messages import SpeculationStats
from cluster.gateway.answer import PreparedCall
from cluster.gateway.call import Piece, TokenSource

Endpoint = Literal["completion", "chat"]
UsageChunks = Literal["none", "last", "every"]  # chunks of a stream that have usage


@dataclass(slots=True)
class AnswerTotals:
    """Totals over all answers to a call."""

    num_prompt_tokens: int
    answers_per_prompt: int
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    _cached_by_prompt: dict[int, int] = field(default_factory=dict)
    _tokens_by_choice: dict[int, int] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        before = self._tokens_by_choice.get(piece.choice, 0)
        self._tokens_by_choice[piece.choice] = max(before, piece.num_completion_tokens)
        self.num_completion_tokens += self._tokens_by_choice[piece.choice] - before
        prompt = piece.choice // self.answers_per_prompt
        self._cached_by_prompt[prompt] = max(self._cached_by_prompt.get(prompt, 0), piece.num_cached_tokens)
        self.num_cached_tokens = sum(self._cached_by_prompt.values())
        if piece.stats is not None:
            self.stats = _sum_stats(self.stats, piece.stats)

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def speculation(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self.stats)


class AnswerWriter:
    """Writes one call's answer, whole or in chunks with the same id, time and model."""

    def __init__(self, endpoint: Endpoint, prepared: PreparedCall, model: str, fingerprint: str) -> None:
        self._is_chat = endpoint == "chat"
        self._head = {"id": prepared.call_id, "created": int(time.time()), "model": model}
        self._fingerprint = fingerprint
        self._wants_stats = prepared.call.wants_stats
        self._wants_sources = prepared.call.wants_token_sources
        self._wants_token_ids = prepared.call.wants_token_ids
        self._requests = prepared.requests
        self._open_choices = len(prepared.requests)
        self._begun: set[int] = set()
        self.totals = AnswerTotals(prepared.num_prompt_tokens, prepared.call.n)

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        texts: list[list[str]] = [[] for _ in range(self._open_choices)]
        token_ids: list[list[int]] = [[] for _ in range(self._open_choices)]
        reasons: list[str | None] = [None] * self._open_choices
        sources: list[list[TokenSource]] = [[] for _ in range(self._open_choices)]
        for piece in pieces:
            texts[piece.choice].append(piece.text)
            sources[piece.choice] += piece.token_sources
            token_ids[piece.choice].extend(piece.token_ids)
            reasons[piece.choice] = piece.finish_reason or reasons[piece.choice]
            self.totals.add(piece)
        choices = []
        for index, (parts, reason) in enumerate(zip(texts, reasons, strict=True)):
            message = {"role": "assistant", "content": "".join(parts), "refusal": None}
            said = {"message": message} if self._is_chat else {"text": "".join(parts)}
            choice = self._choice(index, said, reason, sources[index])
            choices.append(choice | self._ids_of_choice(index, token_ids[index], is_first=True))
        answer = self._object("chat.completion" if self._is_chat else "text_completion", choices)
        answer |= self._ids_of_chat()
        answer["usage"] = self.totals.usage()
        if self._wants_stats:
            answer["speculation"] = self.totals.speculation()
        return answer

    def chunks(self, piece: Piece, usage: UsageChunks) -> list[dict[str, Any]]:
        """The chunks for a piece; after the last piece of the call also the usage chunk, if wanted."""
        self.totals.add(piece)
        written = []
        is_first = piece.choice not in self._begun
        self._begun.add(piece.choice)
        if self._is_chat and is_first:
            opening = self._choice(piece.choice, {"delta": {"role": "assistant", "content": ""}}, None, ())
            written.append(self._object(self._chunk_kind(), [opening]) | self._ids_of_chat())
        delta = {"content": piece.text} if piece.text else {}
        said = {"delta": delta} if self._is_chat else {"text": piece.text}
        choice = self._choice(piece.choice, said, piece.finish_reason, piece.token_sources)
        choice |= self._ids_of_choice(piece.choice, piece.token_ids, is_first=is_first)
        written.append(self._object(self._chunk_kind(), [choice]))
        if piece.finish_reason is not None:
            self._open_choices -= 1
        if usage != "none":
            for chunk in written:
                chunk["usage"] = self.totals.usage() if usage == "every" else None
        if self._open_choices == 0:
            if usage != "none":
                written.append(self._object(self._chunk_kind(), []))
                written[-1]["usage"] = self.totals.usage()
            if self._wants_stats:
                written[-1]["speculation"] = self.totals.speculation()
        return written

    def _choice(
        self, index: int, said: dict[str, Any], finish_reason: str | None, sources: Sequence[TokenSource]
    ) -> dict[str, Any]:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": finish_reason}
        return {**choice, "token_sources": sources} if self._wants_sources else choice

    def _ids_of_choice(self, choice: int, token_ids: Sequence[int], is_first: bool) -> dict[str, list[int]]:
        """Members of a choice where token ids are wanted. A completion has the prompt's in its first chunk."""
        if not self._wants_token_ids:
            return {}
        members = {"token_ids": list(token_ids)}
        if is_first and not self._is_chat:
            members["prompt_token_ids"] = self._requests[choice].prompt_token_ids.tolist()
        return members

    def _ids_of_chat(self) -> dict[str, list[int]]:
        """A chat has one prompt, whose ids are a member of the answer itself."""
        if not self._wants_token_ids or not self._is_chat:
            return {}
        return {"prompt_token_ids": self._requests[0].prompt_token_ids.tolist()}

    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "system_fingerprint": self._fingerprint, "choices": choices}


def _sum_stats(total: SpeculationStats, part: SpeculationStats) -> SpeculationStats:
    accepted = Counter(total.accepted_tokens)
    accepted.update(part.accepted_tokens)
    return SpeculationStats(
        rounds=total.rounds + part.rounds,
        target_rows=total.target_rows + part.target_rows,
        draft_tokens=total.draft_tokens + part.draft_tokens,
        accepted_tokens=dict(accepted),
    )
