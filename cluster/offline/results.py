"""What a `LocalEngine` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]  # without the stop token
    text: str
    finish_reason: Literal["stop", "length"]
    rounds: int  # target forwards that emitted its tokens
    round_tokens: list[int]  # tokens per round; 0 where a stop token came first
    target_rows: int  # rows that the target computed, prompt included
    draft_tokens: int  # draft nodes verified
    accepted_tokens: dict[str, int]  # by source
    seconds: float  # from its first round to its last
    tokens_per_second: float
    logprobs: TokenLogprobs | None = None  # of token_ids, with option `logprobs`
    prompt_logprobs: TokenLogprobs | None = None  # of the prompt's tokens but the first, with `prompt_logprobs`


@dataclass(frozen=True, slots=True)
class BeamSearchResult:
    """The best beam for one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]  # without the stop token
    text: str
    finish_reason: Literal["stop", "length"]
    score: float  # sum of log probabilities / number of tokens ** length_penalty
    seconds: float


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """One round's tokens of an answer. The last piece has the `Generation`, and may have no tokens."""

    text: str
    token_ids: tuple[int, ...]
    sources: tuple[str, ...]  # who proposed each token; "target" for the target's own
    token_texts: tuple[str, ...]  # what each token completed of `text`; "" inside a character of several tokens
    generation: Generation | None = None
