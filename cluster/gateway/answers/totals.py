"""Tokens and speculation of all answers to a call, as OpenAI's usage and our statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from actors.messages import SpeculationStats
from cluster.gateway.answers.piece import Piece

_PREDICTION = "prediction"  # the drafter that proposes a call's prediction


@dataclass(slots=True)
class AnswerTotals:
    """Totals over all answers to a call."""

    num_prompt_tokens: int
    answers_per_prompt: int
    num_prediction_tokens: int = 0
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
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self.num_prediction_tokens:
            accepted = min(self.stats.accepted_tokens.get(_PREDICTION, 0), self.num_prediction_tokens)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": self.num_prediction_tokens - accepted,
            }
        return usage

    def speculation(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self.stats)


def _sum_stats(total: SpeculationStats, part: SpeculationStats) -> SpeculationStats:
    accepted = Counter(total.accepted_tokens)
    accepted.update(part.accepted_tokens)
    return SpeculationStats(
        rounds=total.rounds + part.rounds,
        target_rows=total.target_rows + part.target_rows,
        draft_tokens=total.draft_tokens + part.draft_tokens,
        accepted_tokens=dict(accepted),
    )
