"""Who answers a conversation: an engine in this process or a server; what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.cli.chat.conversation import Message
from cluster.cli.chat.settings import ChatSettings
from cluster.cli.chat.sources import Span
from cluster.router.trace import RoundTrace

Question = str | Sequence[Message]  # a text to go on with, or messages for the chat template
OnRound = Callable[[RoundTrace], None]


@dataclass(frozen=True, slots=True)
class AnswerTotals:
    """What one answer came to."""

    num_tokens: int
    rounds: int
    draft_tokens: int
    accepted: dict[str, int]  # draft tokens, by source
    verified: dict[str, int]  # the same of those that were verified; empty where nobody told
    finish_reason: str


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What came at once. The last part has the totals, and perhaps no text."""

    spans: tuple[Span, ...]
    num_tokens: int | None  # None: nobody told
    totals: AnswerTotals | None = None


class Backend(Protocol):
    model_name: str
    sources: tuple[str, ...]  # drafters, where they are known
    max_draft_tokens: int
    tells_rounds: bool  # whether it calls on_round
    is_coupled: bool  # whether a seed gives the same tokens with any drafts

    def answer(
        self, question: Question, settings: ChatSettings, seed: int | None, on_round: OnRound | None = None
    ) -> Generator[AnswerPart, None, None]:
        """Parts as they come. Closing it, or KeyboardInterrupt from it, ends the answer. Raises PacelineError."""
        ...

    def text_of(self, token_id: int) -> str: ...

    def close(self) -> None: ...
