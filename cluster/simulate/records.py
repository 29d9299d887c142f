"""What became of each request, as its client saw it, and the figures over all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.messages import ServiceClass
from cluster.config import ObjectivesConfig


@dataclass(slots=True)
class Record:
    tenant: int
    turn: int
    num_prompt: int
    arrived: float
    service_class: ServiceClass = "interactive"
    first_at: float = 0.0  # 0: nothing came
    ended_at: float = 0.0  # 0: it has not ended
    num_tokens: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache
    rounds: int = 0
    refusals: int = 0  # sendings that were refused as overloaded
    resumed: int = 0
    outcome: str = ""  # "answered", "cancelled", or the error's name

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrived

    @property
    def tpot_s(self) -> float | None:
        return (self.ended_at - self.first_at) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    def is_good(self, objectives: ObjectivesConfig) -> bool:
        own = objectives.of(self.service_class)
        is_slow = self.tpot_s is not None and own.tpot_s is not None and self.tpot_s > own.tpot_s
        return self.outcome == "answered" and not is_slow and (own.ttft_s is None or self.ttft_s <= own.ttft_s)


def figures_of(records: Sequence[Record], seconds: float, objectives: ObjectivesConfig) -> dict[str, float]:
    """Over the records of requests that arrived within `seconds`."""
    answered = [record for record in records if record.outcome == "answered"]
    outcomes = Counter(record.outcome or "open" for record in records)
    good = sum(record.is_good(objectives) for record in records)
    tokens = sum(record.num_tokens for record in records)
    prompts = sum(record.num_prompt for record in answered)
    rounds = sum(record.rounds for record in answered)
    figures: dict[str, float] = {
        "requests": len(records),
        **{f"requests_{outcome}": count for outcome, count in sorted(outcomes.items())},
        "refusals": sum(record.refusals for record in records),
        "resumed": sum(record.resumed for record in records),
        "requests_per_s": len(answered) / seconds,
        "tokens_per_s": tokens / seconds,
        "goodput_per_s": good / seconds,
        "goodput_share": good / len(records) if records else 0.0,
        "tokens_per_round": sum(record.num_tokens for record in answered) / rounds if rounds else 0.0,
        "prefix_hit_rate": sum(record.num_cached for record in answered) / prompts if prompts else 0.0,
    }
    for name, values in (
        ("ttft", [record.ttft_s for record in answered]),
        ("tpot", [record.tpot_s for record in answered if record.tpot_s is not None]),
    ):
        told = np.asarray(values or [0.0]) * 1e3
        figures[f"{name}_p50_ms"], figures[f"{name}_p99_ms"] = np.percentile(told, [50, 99]).tolist()
    return figures
