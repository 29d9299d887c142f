"""Pieces of an answer's text, without wire format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from actors.messages import SpeculationStats
from cluster.gateway.answers.logprobs import TokenScore

FinishReason = Literal["stop", "length"]
TokenSource = tuple[str, str]  # text of a token, and who proposed it: a drafter's name or "target"


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one answer. The last piece of an answer has a finish reason, and only it has cached tokens and
    statistics."""

    choice: int  # prompt index * n + answer index
    text: str
    finish_reason: FinishReason | None = None
    num_completion_tokens: int = 0  # of the answer so far
    stop_string: str | None = None  # that ended the answer
    num_cached_tokens: int = 0  # prompt tokens from the prefix cache
    stats: SpeculationStats | None = None
    token_sources: tuple[TokenSource, ...] = ()  # of `text`, where the call wants them; every piece has its own
    token_ids: tuple[int, ...] = ()  # new ones, where the call wants them
    scores: tuple[TokenScore, ...] = ()  # of new tokens, where the call wants them; of a prompt that is echoed, too
    prompt_scores: tuple[TokenScore, ...] = ()  # of the prompt, with an answer's first piece, where the call wants them


def joined_by_choice(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of a whole call as one piece for each of its answers, in order of choice."""
    by_choice: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_choice.setdefault(piece.choice, []).append(piece)
    return [joined(by_choice[choice]) for choice in sorted(by_choice)]


def joined(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces of one answer, at least one, as one."""
    if len(pieces) == 1:
        return pieces[0]
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_sources=tuple(pair for piece in pieces for pair in piece.token_sources),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        scores=tuple(score for piece in pieces for score in piece.scores),
        prompt_scores=next((piece.prompt_scores for piece in pieces if piece.prompt_scores), ()),
    )
