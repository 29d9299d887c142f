"""What answers a conversation: an engine in this process or a server."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cluster.generation import GenerationOptions
from cluster.router.trace import RoundTrace

Message = dict[str, str]  # its role (system, user or assistant) and content


class Span(NamedTuple):
    """Text of an answer and who proposed it; None: unknown."""

    text: str
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTotals:
    num_tokens: int
    rounds: int
    draft_tokens: int  # verified
    accepted: dict[str, int]  # draft tokens, by source
    finish_reason: str


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What arrives at once. The last part has the totals, and may have no text."""

    spans: Sequence[Span]
    num_tokens: int | None  # None: unknown
    totals: AnswerTotals | None = None
    rounds: Sequence[RoundTrace] = ()  # since the last part; the last of them emitted the spans


class Backend(Protocol):
    model_name: str
    sources: tuple[str, ...] = ()  # names of drafters; empty: unknown, or none
    tells_rounds: bool = False  # whether parts have rounds
    is_coupled: bool = True  # whether a seed gives the same tokens with any drafts

    def answer(self, messages: Sequence[Message], options: GenerationOptions) -> Generator[AnswerPart, None, None]:
        """Parts as they arrive. Closing it, or KeyboardInterrupt from it, ends the answer. Raises PacelineError."""
        ...

    def text_of(self, token_id: int) -> str:
        return str(token_id)
