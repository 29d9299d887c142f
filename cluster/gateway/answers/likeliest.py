"""The likeliest of several answers."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from cluster.gateway.answers.piece import Piece
from cluster.gateway.requests.call import GenerationCall


def likeliest(answers: Sequence[Piece], call: GenerationCall) -> list[Piece]:
    """Whole answers, in order of choice; of the `call.n` to a prompt the `call.num_given` with the largest
    log-probability a token, likeliest first."""
    if call.num_given is None:
        return list(answers)
    groups = (answers[begin : begin + call.n] for begin in range(0, len(answers), call.n))
    return [one for group in groups for one in sorted(group, key=_mean_logprob, reverse=True)[: call.num_given]]


def _mean_logprob(answer: Piece) -> float:
    """Without that of an echoed prompt, which comes first."""
    count = answer.num_completion_tokens
    logprobs = [score.logprob or 0.0 for score in answer.scores[len(answer.scores) - count :]]
    return sum(logprobs) / count if count else -inf
