"""What drafts out of the shared cache have earned for the requests of a namespace: counts that tell an administrator
which namespaces are worth their memory."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from operator import add


@dataclass(frozen=True, slots=True)
class Earnings:
    """Counts since the namespace began, or of some requests."""

    requests: int = 0  # that might draft from the cache, and have ended
    hits: int = 0  # of them, those that it has saved a round
    rounds: int = 0  # of all of them
    accepted_tokens: int = 0  # drafted from the cache, and right; where others had the same draft, credited to one
    # Tokens drafted from the cache and verified, alone or with others, and those of them that were right, by how the
    # cache had fared before in the same text: as its confidence had it, worse, or better.
    proposed_as_expected: int = 0
    right_as_expected: int = 0
    proposed_worse: int = 0
    right_worse: int = 0
    proposed_better: int = 0
    right_better: int = 0

    @property
    def shares_right(self) -> dict[str, float | None]:
        """Of what was verified, by kind of text; None where nothing was."""
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
        """That the cache has added."""
        return self.accepted_tokens / self.rounds if self.rounds else None

    def __add__(self, other: Earnings) -> Earnings:
        return Earnings(*map(add, astuple(self), astuple(other)))

    def counts(self) -> dict[str, int]:
        """By name, as they are kept."""
        return asdict(self)
