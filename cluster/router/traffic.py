"""What rounds have shown of drafting, separately for each namespace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from cache_service.store.fair_share import first_to_give_way
from cluster.router.draft_depth import DraftDepth
from cluster.router.draft_merit import DraftMerit
from cluster.router.draft_wait import DraftWait
from cluster.router.pool_wait import PoolWait

FIRST_EXPLORE_ROUNDS = 32  # between rounds that verify more than seems to pay

_MAX_NAMESPACES = 64  # that are known at a time


@dataclass(slots=True)
class Traffic:
    """Drafting statistics of the rounds of one namespace, or of all rounds of several.

    Which drafts pay reveals something of a tenant's text. So rounds with one namespace are planned only from the
    statistics of this namespace. Rounds with several namespaces share one record: their requests influence one
    another's timing anyway.
    """

    draft_wait: PoolWait = field(default_factory=PoolWait)
    head_wait: DraftWait = field(default_factory=DraftWait)  # for the target's head
    depths: list[DraftDepth] = field(default_factory=lambda: [DraftDepth()])  # of draft workers' trees, by pool
    head_depth: DraftDepth = field(default_factory=DraftDepth)  # of the head's
    merits: list[DraftMerit] = field(default_factory=lambda: [DraftMerit()])  # by pool; of one namespace
    explore_rounds: int = FIRST_EXPLORE_ROUNDS
    explore_in: int = FIRST_EXPLORE_ROUNDS

    @classmethod
    def of_pools(cls, num_pools: int) -> Traffic:
        pools = range(num_pools)
        return cls(PoolWait(num_pools), depths=[DraftDepth() for _ in pools], merits=[DraftMerit() for _ in pools])

    def forget_pool(self, pool: int) -> None:
        """Drop what the draft workers of a pool have shown."""
        self.draft_wait.forget_pool(pool)
        self.depths[pool] = DraftDepth()
        self.merits[pool] = DraftMerit()


class TrafficRecords:
    """A `Traffic` for each namespace. When there are too many, the owner with most namespaces loses its least recently
    used one."""

    def __init__(self, num_pools: int = 1) -> None:
        """num_pools: of draft workers."""
        self._num_pools = num_pools
        self._mixed = Traffic.of_pools(num_pools)
        self._records: OrderedDict[str, Traffic] = OrderedDict()

    def of(self, namespaces: Iterable[str]) -> Traffic:
        """The record of a round of sequences of these namespaces."""
        distinct = set(namespaces)
        if len(distinct) != 1:
            return self._mixed
        namespace = distinct.pop()
        record = self._records.get(namespace)
        if record is None:
            record = self._records[namespace] = Traffic.of_pools(self._num_pools)
            if len(self._records) > _MAX_NAMESPACES:
                del self._records[first_to_give_way(list(self._records))]
        self._records.move_to_end(namespace)
        return record

    def drop(self, namespace: str) -> None:
        """Drop this namespace's statistics; statistics of mixed rounds are shared and kept."""
        self._records.pop(namespace, None)

    def forget_pool(self, pool: int) -> None:
        """Drop what the draft workers of a pool have shown, in all namespaces."""
        for record in (self._mixed, *self._records.values()):
            record.forget_pool(pool)
