"""Log-probabilities as OpenAI's objects show them."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.messages import TokenLogprobs
from cluster.text.token_strings import TokenStrings

LEAST = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token with its log-probability, and the likeliest tokens in its place, likeliest first."""

    token_id: int
    logprob: float | None  # None: the first token of a prompt
    top: tuple[tuple[int, float], ...] = ()


def token_scores(token_ids: Sequence[int], logprobs: TokenLogprobs) -> list[TokenScore]:
    """One of each token. logprobs: of at least as many."""
    k = logprobs.k
    chosen, ids, values = logprobs.chosen.tolist(), logprobs.token_ids.tolist(), logprobs.logprobs.tolist()
    return [
        TokenScore(
            token,
            max(LEAST, chosen[place]),
            tuple(
                (other, max(LEAST, value))
                for other, value in zip(ids[place * k : place * k + k], values[place * k : place * k + k], strict=True)
            ),
        )
        for place, token in enumerate(token_ids)
    ]


def chat_logprobs(scores: Sequence[TokenScore], strings: TokenStrings) -> dict[str, Any]:
    """`logprobs` of a chat completion's choice."""
    return {
        "content": [
            {
                **_named(score.token_id, score.logprob, strings),
                "top_logprobs": [_named(token_id, logprob, strings) for token_id, logprob in score.top],
            }
            for score in scores
        ],
        "refusal": None,
    }


class TextOffsets:
    """Where the tokens of one text begin, in characters. A character that several tokens make counts with its last."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._next = 0

    def push(self, token: bytes) -> int:
        """The next token's offset."""
        offset = self._next
        self._next += len(self._decoder.decode(token))
        return offset


def completion_logprobs(scores: Sequence[TokenScore], strings: TokenStrings, offsets: TextOffsets) -> dict[str, Any]:
    """`logprobs` of a text completion's choice. offsets: of the choice's whole text."""
    return {
        "tokens": [strings.text_of(score.token_id) for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [None if score.logprob is None else _by_text(score, strings) for score in scores],
        "text_offset": [offsets.push(strings.bytes_of(score.token_id)) for score in scores],
    }


def prompt_logprobs(scores: Sequence[TokenScore], strings: TokenStrings) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt, itself and the likeliest tokens in its place by their
    ids. The rank of a token that is not among the likeliest is null."""
    return [None if score.logprob is None else _by_id(score, strings) for score in scores]


def _by_id(score: TokenScore, strings: TokenStrings) -> dict[str, dict[str, Any]]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(score.top, 1)}
    found = {score.token_id: score.logprob} | dict(score.top)
    return {
        str(token_id): {"logprob": logprob, "rank": ranks.get(token_id), "decoded_token": strings.text_of(token_id)}
        for token_id, logprob in found.items()
    }


def _by_text(score: TokenScore, strings: TokenStrings) -> dict[str, float]:
    """The likeliest tokens; the token itself is always among them, as in OpenAI's answers."""
    found: dict[str, float] = {}
    for token_id, logprob in (*score.top, (score.token_id, score.logprob or 0.0)):
        found.setdefault(strings.text_of(token_id), logprob)  # of tokens with one text, the likeliest
    return found


def _named(token_id: int, logprob: float | None, strings: TokenStrings) -> dict[str, Any]:
    return {"token": strings.text_of(token_id), "logprob": logprob, "bytes": list(strings.bytes_of(token_id))}
