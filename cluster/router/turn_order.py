"""The order in which sequences of a class take places that become free before one round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heapreplace

from cluster.router.fair_turns import FairTurns
from cluster.router.sequence import Sequence

_Head = tuple[bool, bool, float, int, Sequence]


class TurnOrder:
    """The least urgency first, then tenants in fair turns, then in order of arrival. Made in O(n log n); the next one
    is found in O(log n), so many places that become free at once do not make a round late."""

    def __init__(
        self, sequences: Iterable[Sequence], urgency: Callable[[Sequence], tuple[bool, bool]], turns: FairTurns
    ) -> None:
        self._turns = turns
        self._lines: dict[str, list[tuple[bool, bool, int, Sequence]]] = {}  # by tenant, the last is first
        for sequence in sequences:
            line = self._lines.setdefault(sequence.request.tenant, [])
            line.append((*urgency(sequence), sequence.arrival, sequence))
        for line in self._lines.values():
            line.sort(reverse=True)
        turns.wait(self._lines)
        self._heads = [self._head(tenant) for tenant in self._lines]
        heapify(self._heads)
        self._left: set[int] = set()

    def first(self) -> Sequence | None:
        while self._heads:
            sequence = self._heads[0][-1]
            tenant = sequence.request.tenant
            line = self._lines[tenant]
            if sequence.seq_id in self._left:
                line.pop()
                if not line:
                    heappop(self._heads)
                    continue
            elif self._heads[0][2] == self._turns.spent(tenant):
                return sequence
            heapreplace(self._heads, self._head(tenant))  # what a tenant has spent only grows meanwhile
        return None

    def leave(self, sequence: Sequence) -> None:
        """It has its place."""
        self._left.add(sequence.seq_id)

    def _head(self, tenant: str) -> _Head:
        has_not_begun, is_late, arrival, sequence = self._lines[tenant][-1]
        return has_not_begun, is_late, self._turns.spent(tenant), arrival, sequence
