"""All sources of drafts of a router: its own drafters, the target's head and the draft workers.

Whatever a source does wrong costs only its own drafts and is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.router.cpu_drafting import CpuDrafting
from cluster.router.draft_pools import DraftPools
from cluster.router.head_drafting import HeadDrafting
from cluster.router.round import Round
from cluster.router.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Drafting:
    cpu: CpuDrafting
    head: HeadDrafting
    remote: DraftPools

    def num_successors_of(self, round: Round) -> int:
        """Target predictions a row of this round that drafters or draft workers learn from; 0: none of them learns."""
        return self.cpu.num_successors or int(self.remote.wants_corrections(round))

    def drop_namespace(self, namespace: str) -> None:
        """Drop what drafters and draft workers have learnt in a namespace."""
        self.cpu.drop_namespace(namespace)
        self.remote.drop_namespace(namespace)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended or gets another id: drafters free it now, its workers with their next batch."""
        self.remote.forget(sequence)
        self.cpu.forget(sequence)
