"""What rounds have shown of drafting that later rounds go by, apart for each namespace.

What pays for one tenant's text says something of the text. So a round of one namespace goes by what such rounds of its
own have shown, and is the same whatever others have asked before. Rounds of several namespaces have a record of their
own, which they share: who is in one meets the others' requests in its time anyway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from cache_service.store.fair_share import first_to_give_way
from cluster.router.draft_wait import DraftWait

FIRST_EXPLORE_ROUNDS = 32  # between rounds that verify more than seems to pay

_MAX_NAMESPACES = 64  # that are known at a time


@dataclass(slots=True)
class Traffic:
    """Of the rounds of one namespace, or of those of several."""

    draft_wait: DraftWait = field(default_factory=DraftWait)
    head_wait: DraftWait = field(default_factory=DraftWait)  # of the target's head
    explore_rounds: int = FIRST_EXPLORE_ROUNDS
    explore_in: int = FIRST_EXPLORE_ROUNDS


class TrafficRecords:
    """Of the owner with most namespaces, the one that was used least recently is forgotten first."""

    def __init__(self) -> None:
        self._mixed = Traffic()
        self._records: OrderedDict[str, Traffic] = OrderedDict()

    def of(self, namespaces: Iterable[str]) -> Traffic:
        """That of a round of sequences of these namespaces."""
        distinct = set(namespaces)
        if len(distinct) != 1:
            return self._mixed
        namespace = distinct.pop()
        record = self._records.get(namespace)
        if record is None:
            record = self._records[namespace] = Traffic()
            if len(self._records) > _MAX_NAMESPACES:
                del self._records[first_to_give_way(list(self._records))]
        self._records.move_to_end(namespace)
        return record

    def drop(self, namespace: str) -> None:
        """Forget a namespace's. Of the rounds that it shared with others, what was learnt stays: it is nobody's."""
        self._records.pop(namespace, None)
