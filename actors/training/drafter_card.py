"""The card of a draft model that was made for a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CARD_FILE = "drafter.json"


@dataclass(frozen=True, slots=True)
class DrafterCard:
    """What was built and how well it predicts the target. Saved as drafter.json beside the weights."""

    target: str
    target_fingerprint: str
    recipe: dict[str, Any]
    text_tokens: int  # written and trained on
    agreement: float  # share of held-out greedy tokens where drafter and target choose the same
    agreement_before: float  # the same before the distillation
    coverage: float  # share of held-out greedy tokens that are in the output vocabulary
    tokens_per_round: float  # held out, drafted greedily in chains of `chain_length` tokens
    chain_length: int
    # For a parallel model: agreement of its guesses of the first, second, ... token after a held-out text
    agreement_by_depth: list[float]
    evaluation: dict[str, float]  # agreement on other prompts, where some were given
    seconds: float
