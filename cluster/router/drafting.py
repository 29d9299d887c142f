"""All sources of drafts of a router: its own drafters, the target's head and the draft workers.

Whatever a source does wrong costs only its own drafts and is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from actors.drafters.contract import CpuDrafter, VerifiedRows
from actors.messages import DraftResult, VerifyResult
from cache_service.automata.shared_phrases import SharedPhrases
from cluster.router.counters import RouterCounters
from cluster.router.cpu_drafting import CpuDrafting
from cluster.router.draft_scaling import DraftScaling
from cluster.router.draft_sources import DraftSources
from cluster.router.drafter_failures import DrafterFailures
from cluster.router.head_drafting import HeadDrafting
from cluster.router.proposals import Proposals
from cluster.router.round import Emitted, Round, RoundEntry
from cluster.router.sequence import Sequence
from cluster.router.worker_drafting import DraftShape, WorkerDrafting


class Drafting:
    """The methods are called in the order of a round: `ask`, `propose`, `take_results`, `observe`."""

    def __init__(
        self,
        drafters: Mapping[str, CpuDrafter],
        sources: DraftSources,
        sequences: Mapping[int, Sequence],
        *,
        shape: DraftShape,
        vocab_size: int,
        counters: RouterCounters,
        phrases: SharedPhrases | None = None,
        scaling: DraftScaling | None = None,
    ) -> None:
        """sequences: of the router by id, a mapping that changes with it; phrases: of the shared cache, for ouroboros;
        scaling: told how workers answer."""
        proposals = Proposals(sources.names, vocab_size, counters)
        failures = DrafterFailures(counters)
        self._cpu = CpuDrafting(drafters, proposals, failures)
        self._head = HeadDrafting(proposals, counters)
        self._workers = WorkerDrafting(
            shape,
            sequences,
            names=sources.names,
            proposals=proposals,
            counters=counters,
            failures=failures,
            phrases=phrases,
            scaling=scaling or DraftScaling(),
        )

    @property
    def most_required(self) -> Mapping[int, int]:
        """Most nodes that a CPU drafter requires of a sequence, by source index."""
        return self._cpu.most_required

    @property
    def has_notices(self) -> bool:
        """Whether draft workers are still to be told of sequences that have ended or namespaces to drop."""
        return self._workers.has_notices

    def set_workers(self, worker_ids: SequenceOf[str], sequences: Iterable[Sequence]) -> None:
        self._workers.set_workers(worker_ids, list(sequences))

    def ask(self, round: Round) -> None:
        """Write the draft batches, and mark what the target's head is to draft, where that pays."""
        self._workers.ask(round)
        self._head.ask(round)

    def propose(self, round: Round) -> None:
        """Run the CPU drafters, and propose what the head drafted in the last round."""
        self._head.propose(round)
        self._cpu.propose(round)

    def take_results(self, round: Round, results: Mapping[str, DraftResult | None]) -> None:
        """results: of the draft workers; None or missing: no answer in time."""
        self._workers.take_results(round, results)

    def observe(
        self, round: Round, emitted: list[Emitted], verified: np.ndarray | None, accepted: np.ndarray | None
    ) -> None:
        """Tell the CPU drafters what became of the round. verified, accepted: nodes by [entry, source], or None."""
        self._cpu.observe(round, emitted, verified, accepted)

    def keep_head_drafts(self, round: Round, result: VerifyResult) -> None:
        """Keep the head's trees for the next round. Call it when the round's tokens are committed."""
        self._head.keep(round, result)

    @property
    def num_successors(self) -> int:
        """Target predictions a row that CPU drafters want to learn from; 0: none of them learns."""
        return self._cpu.num_successors

    def num_successors_of(self, round: Round) -> int:
        """Target predictions a row of this round that drafters or draft workers want; 0: nobody does."""
        return self._cpu.num_successors or int(self._workers.wants_corrections(round))

    def remember(self, rows: VerifiedRows) -> None:
        """Let the CPU drafters that learn from target predictions see these."""
        self._cpu.remember(rows)

    def keep_corrections(self, entries: Iterable[RoundEntry], result: VerifyResult, token_ids: np.ndarray) -> None:
        """As `WorkerDrafting.keep_corrections`."""
        self._workers.keep_corrections(entries, result, token_ids)

    def drop_namespace(self, namespace: str) -> None:
        """Drop what drafters and draft workers have learnt in a namespace."""
        self._cpu.drop_namespace(namespace)
        self._workers.drop_namespace(namespace)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended or gets another id: free it at the drafters now, at its worker with a next batch."""
        self._workers.forget(sequence)
        self._cpu.forget(sequence)
