"""Acceptance of each source's drafts in one text: statistics for `Earnings` of the shared cache."""

from __future__ import annotations

AS_EXPECTED, WORSE, BETTER = range(3)

_DECAY = 0.97  # applied to a record by each round that adds to it
_PRIOR_NODES = 4.0  # added to accepted and expected nodes: with few nodes the ratio stays near 1
_WORSE_BELOW = 0.8  # ratio of accepted to expected nodes
_BETTER_ABOVE = 1.25


class DraftRecord:
    """Accepted nodes of each source in one text, and how many the calibration expected.

    `classes`: AS_EXPECTED, WORSE or BETTER, by source. `outcomes`: by source, verified and accepted nodes while the
    source was AS_EXPECTED, then while WORSE, then while BETTER; never decayed.
    """

    __slots__ = ("_accepted", "_expected", "classes", "outcomes")

    def __init__(self, num_sources: int) -> None:
        self._accepted = [0.0] * num_sources
        self._expected = [0.0] * num_sources
        self.classes = [AS_EXPECTED] * num_sources
        self.outcomes = [[0] * 6 for _ in range(num_sources)]

    def add(self, verified: list[int], accepted: list[int], expected: list[float]) -> None:
        """Add a round's nodes by source. A source without verified nodes keeps its record."""
        for source, num_verified in enumerate(verified):
            if not num_verified:
                continue
            outcome, first = self.outcomes[source], 2 * self.classes[source]
            outcome[first] += num_verified
            outcome[first + 1] += accepted[source]
            self._accepted[source] = self._accepted[source] * _DECAY + accepted[source]
            self._expected[source] = self._expected[source] * _DECAY + expected[source]
            ratio = (self._accepted[source] + _PRIOR_NODES) / (self._expected[source] + _PRIOR_NODES)
            self.classes[source] = WORSE if ratio < _WORSE_BELOW else BETTER if ratio > _BETTER_ABOVE else AS_EXPECTED
