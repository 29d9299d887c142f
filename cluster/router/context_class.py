"""The class of context that a draft is made in: whose traffic it is, and how its source has fared in this text so far.

A source's confidence is worth one thing on the average and another in a text that it suits: what follows a match is
copied in a summary and changed in a translation. So its calibration has a curve for each class.
"""

from __future__ import annotations

from collections import OrderedDict

from cache_service.store.fair_share import first_to_give_way

AS_EXPECTED, WORSE, BETTER = range(3)
NUM_RECORDS = 3
MAX_NAMESPACES = 64  # that are known at a time, beside those that are in a round

_FADING = 0.97  # of a text's record, each round that adds to it
_DOUBT = 4.0  # nodes that a record lacks to be clear
_WORSE_BELOW = 0.8  # accepted to expected
_BETTER_ABOVE = 1.25


class DraftRecord:
    """Of one text: nodes of each source that were accepted, and how many were to be expected; old ones fade.

    `outcomes` do not: of each source, verified and accepted nodes in AS_EXPECTED, then in WORSE and in BETTER.
    """

    __slots__ = ("_accepted", "_expected", "classes", "outcomes")

    def __init__(self, num_sources: int) -> None:
        self._accepted = [0.0] * num_sources
        self._expected = [0.0] * num_sources
        self.classes = [AS_EXPECTED] * num_sources  # of each source: AS_EXPECTED, WORSE or BETTER
        self.outcomes = [[0] * (2 * NUM_RECORDS) for _ in range(num_sources)]

    def add(self, verified: list[int], accepted: list[int], expected: list[float]) -> None:
        """Take in a round: nodes by source. A source without verified nodes keeps its record."""
        for source, tried in enumerate(verified):
            if not tried:
                continue
            outcome, first = self.outcomes[source], 2 * self.classes[source]
            outcome[first] += tried
            outcome[first + 1] += accepted[source]
            right = self._accepted[source] = self._accepted[source] * _FADING + accepted[source]
            hoped = self._expected[source] = self._expected[source] * _FADING + expected[source]
            ratio = (right + _DOUBT) / (hoped + _DOUBT)
            self.classes[source] = WORSE if ratio < _WORSE_BELOW else BETTER if ratio > _BETTER_ABOVE else AS_EXPECTED


class NamespaceSlots:
    """Numbers for the namespaces in use. Of the owner who has most of them, the namespace that was used least recently
    gives its up, but none of the last `num_spared`."""

    def __init__(self, num_spared: int, num_others: int = MAX_NAMESPACES) -> None:
        self._num_spared = num_spared
        self._capacity = num_spared + num_others
        self._slots: OrderedDict[str, int] = OrderedDict()

    def slot(self, namespace: str) -> tuple[int, bool]:
        """The namespace's number, and whether it has just got it."""
        found = self._slots.get(namespace)
        if found is not None:
            self._slots.move_to_end(namespace)
            return found, False
        free = len(self._slots)
        if free == self._capacity:
            free = self._slots.pop(first_to_give_way([*self._slots, namespace], num_spared=self._num_spared))
        self._slots[namespace] = free
        return free, True

    def known(self, namespace: str) -> int | None:
        """The namespace's number if it has one; asking is no use of it."""
        return self._slots.get(namespace)
