"""Who answers a conversation: an engine in this process or a server; what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.cli.chat.settings import ChatSettings
from cluster.router.trace import RoundTrace

OnRound = Callable[[RoundTrace], None]
Message = dict[str, str]  # its role (system, user or assistant) and content


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of an answer. source None: nobody told who proposed it."""

    text: str
    source: str | None


@dataclass(frozen=True, slots=True)
class AnswerTotals:
    """What one answer came to."""

    num_tokens: int
    rounds: int
    draft_tokens: int
    accepted: dict[str, int]  # draft tokens, by source
    verified: dict[str, int]  # the same of those that were verified; empty where nobody told
    finish_reason: str


@dataclass(slots=True)
class Turn:
    """An answer and its times in seconds since the question. totals None: it was stopped."""

    text: str = ""
    first_s: float = 0.0  # the first tokens were there
    first_tokens: int = 0  # how many those were
    last_s: float = 0.0
    totals: AnswerTotals | None = None


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What came at once. The last part has the totals, and perhaps no text."""

    spans: tuple[Span, ...]
    num_tokens: int | None  # None: nobody told
    totals: AnswerTotals | None = None


class Backend(Protocol):
    model_name: str
    sources: tuple[str, ...]  # drafters, where they are known
    tells_rounds: bool  # whether it calls on_round
    is_coupled: bool  # whether a seed gives the same tokens with any drafts

    def answer(
        self, messages: Sequence[Message], settings: ChatSettings, seed: int | None, on_round: OnRound | None = None
    ) -> Generator[AnswerPart, None, None]:
        """Parts as they come. Closing it, or KeyboardInterrupt from it, ends the answer. Raises PacelineError."""
        ...

    def text_of(self, token_id: int) -> str: ...

    def close(self) -> None: ...
