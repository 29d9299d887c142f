"""Hit statistics of a namespace: how much drafts from the shared cache saved its requests."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from operator import add


@dataclass(frozen=True, slots=True)
class Earnings:
    """Counts since the namespace began, or for some requests."""

    requests: int = 0  # ended requests that were allowed to draft from the cache
    hits: int = 0  # requests with an accepted token from the cache
    rounds: int = 0  # sum over all requests
    accepted_tokens: int = 0  # accepted tokens credited to the cache; only one of several sources gets the credit
    # Tokens that the cache proposed, alone or with other sources, and that were verified; and how many were right.
    # Split by how the cache had done earlier in the same text: as its confidence predicted, worse, or better.
    proposed_as_expected: int = 0
    right_as_expected: int = 0
    proposed_worse: int = 0
    right_worse: int = 0
    proposed_better: int = 0
    right_better: int = 0

    @property
    def shares_right(self) -> dict[str, float | None]:
        """Share of verified tokens that were right, by earlier success in the text; None where none was verified."""
        outcomes = {
            "as expected": (self.right_as_expected, self.proposed_as_expected),
            "worse": (self.right_worse, self.proposed_worse),
            "better": (self.right_better, self.proposed_better),
        }
        return {name: right / proposed if proposed else None for name, (right, proposed) in outcomes.items()}

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.requests if self.requests else None

    @property
    def tokens_per_round(self) -> float | None:
        """Accepted tokens per round credited to the cache."""
        return self.accepted_tokens / self.rounds if self.rounds else None

    def __add__(self, other: Earnings) -> Earnings:
        return Earnings(*map(add, astuple(self), astuple(other)))

    def counts(self) -> dict[str, int]:
        """Fields of the hash in Redis."""
        return asdict(self)
