"""How much drafts from the shared cache helped the requests of a namespace; tells which namespaces are worth memory."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from operator import add


@dataclass(frozen=True, slots=True)
class Earnings:
    """Counts for some requests, or for all since the namespace began."""

    requests: int = 0  # finished requests that could draft from the cache
    hits: int = 0  # requests that it saved at least one round
    rounds: int = 0  # rounds of all requests
    accepted_tokens: int = 0  # drafted from the cache and accepted; a draft that several sources had counts for one
    # Tokens drafted from the cache and verified, and how many of them were right, by the cache's earlier record in the
    # same text: as good as its confidence said, worse, or better.
    proposed_as_expected: int = 0
    right_as_expected: int = 0
    proposed_worse: int = 0
    right_worse: int = 0
    proposed_better: int = 0
    right_better: int = 0

    @property
    def shares_right(self) -> dict[str, float | None]:
        """Share of the verified tokens that were right, by kind of text; None where nothing was verified."""
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
        """Tokens that the cache added per round."""
        return self.accepted_tokens / self.rounds if self.rounds else None

    def __add__(self, other: Earnings) -> Earnings:
        return Earnings(*map(add, astuple(self), astuple(other)))

    def counts(self) -> dict[str, int]:
        """Counts by the field names under which they are stored."""
        return asdict(self)
