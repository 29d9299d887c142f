"""The pools of draft workers of a router, one for each draft model: which of them a round asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from actors.messages import DraftItem, DraftResult, VerifyResult
from cluster.router.draft_depth import DraftCosts
from cluster.router.pool_wait import Pools
from cluster.router.round import Emitted, Round, RoundEntry
from cluster.router.sequence import Sequence
from cluster.router.traffic import TrafficRecords
from cluster.router.worker_drafting import Asking, WorkerDrafting


class DraftPools:
    """Which pools a round asks depends on its record (`Traffic.draft_wait`). In a round of several namespaces that asks
    several pools, each sequence is drafted for by those that are right in its namespace (`Traffic.merits`)."""

    def __init__(self, pools: Mapping[str, WorkerDrafting], records: TrafficRecords) -> None:
        """pools: by name, in the order of their indices."""
        self.names = tuple(pools)
        self._records = records
        self._pools = list(pools.values())
        self._models: dict[str, frozenset[str]] = {}  # that the workers of a pool have run, when it had any last

    def set_workers(self, pool: str, models: Mapping[str, str], sequences: Iterable[Sequence]) -> bool:
        """models: the draft model of each connected worker of the pool. Returns whether the models have changed, so
        that statistics of the pool are obsolete."""
        self._pools[self.names.index(pool)].workers.set_workers(list(models), sequences)
        before, now = self._models.get(pool), frozenset(models.values())
        if not now:
            return False
        self._models[pool] = now
        return before is not None and before != now

    @property
    def has_workers(self) -> bool:
        return any(len(pool.workers) for pool in self._pools)

    @property
    def has_notices(self) -> bool:
        """Whether a worker has yet to be notified of ended sequences or of namespaces to drop."""
        return any(pool.workers.has_notices for pool in self._pools)

    def ask(self, round: Round, costs_of: Callable[[Round, float], DraftCosts]) -> None:
        """Write draft batches for the sequences that emit, of the pools for which waiting pays. Workers that the round
        does not wait for receive prompts of sequences that do not emit yet. costs_of: returns the costs of drafts in
        the round; its argument is the tokens per second of such rounds, 0 if unknown."""
        wait, size = round.traffic.draft_wait, round.size
        asking: list[Asking] = [pool.could_ask(round) for pool in self._pools]
        there = [index for index, entries in enumerate(asking) if entries]
        asked = wait.pools_to_ask(size.num_emitting, there) if there else ()
        if len(asked) > 1 and len({entry.sequence.namespace for entry in round.entries}) > 1:
            self._leave_out(asking, asked)
        costs = costs_of(round, wait.tokens_per_s(size.num_emitting, asked) or 0.0) if asked else None
        for index, pool in enumerate(self._pools):
            items: dict[str, list[DraftItem]] = {}
            worth: dict[str, np.ndarray] = {}
            if costs is not None and index in asked:
                worth = pool.ask(round, asking[index], costs, items)
            if len(pool.workers) and (
                index in asked or (not asking[index] and wait.seems_to_pay(size.num_running, index))
            ):
                pool.send_prompts_ahead(round, items)
            for worker_id, batch in pool.batches(round, items, worth).items():
                round.asked.batches[worker_id] = batch
                round.asked.pool_of[worker_id] = index

    def _leave_out(self, asking: list[Asking], asked: Pools) -> None:
        """Take entries off the pools whose drafts are seldom right in their namespace, where another one that may draft
        for them is right more often."""
        able: dict[int, list[int]] = {}  # pools by sequence
        namespaces: dict[int, str] = {}
        for pool in asked:
            for entry, _ in asking[pool]:
                able.setdefault(entry.seq_id, []).append(pool)
                namespaces[entry.seq_id] = entry.sequence.namespace
        wanted: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        for namespace, pools in dict.fromkeys((namespaces[seq_id], tuple(pools)) for seq_id, pools in able.items()):
            merits = self._records.of([namespace]).merits
            best = max(merits[pool].tokens for pool in pools)
            wanted[namespace, pools] = {pool for pool in pools if merits[pool].is_wanted(best)}
        for pool in asked:
            asking[pool] = [
                (entry, worker_id)
                for entry, worker_id in asking[pool]
                if pool in wanted[namespaces[entry.seq_id], tuple(able[entry.seq_id])]
            ]

    def take_results(self, round: Round, results: Mapping[str, DraftResult | None]) -> None:
        """results: by worker; None or missing: no answer in time."""
        for worker_id, index in round.asked.pool_of.items():
            self._pools[index].take_result(round, worker_id, results.get(worker_id))

    def observe(self, round: Round, emitted: list[Emitted]) -> None:
        """Learn how likely drafts are right. Call it when the round's tokens are committed."""
        for index in round.asked.pools:
            self._pools[index].observe(round, emitted)
            if len(self._pools) > 1:
                self._observe_merit(index, round, emitted)

    def _observe_merit(self, index: int, round: Round, emitted: list[Emitted]) -> None:
        for entry_index, first, _ in emitted:
            entry = round.entries[entry_index]
            right = self._pools[index].right_tokens(entry, first)
            if right is not None:
                self._records.of([entry.sequence.namespace]).merits[index].observe(right)

    def wants_corrections(self, round: Round) -> bool:
        """Whether a worker learns from the target predictions of this round."""
        return any(pool.wants_corrections(round) for pool in self._pools)

    def keep_corrections(self, entries: SequenceOf[RoundEntry], result: VerifyResult, token_ids: np.ndarray) -> None:
        """Keep target predictions after rejected draft tokens: see `WorkerDrafting.keep_corrections`."""
        for pool in self._pools:
            pool.keep_corrections(entries, result, token_ids)

    def drop_namespace(self, namespace: str) -> None:
        for pool in self._pools:
            pool.drop_namespace(namespace)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended or gets another id; its workers are notified with their next batches."""
        for pool in self._pools:
            pool.workers.forget(sequence)
