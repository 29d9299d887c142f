"""Which draft worker serves which sequence, what that worker holds of it, and whether it answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from actors.draft_worth import no_worth
from actors.messages import DraftBatch, DraftItem
from cache_service import splitmix64
from cluster.router.sequence import Sequence

_LOAD_SLACK = 1.25  # a worker takes at most this multiple of the mean number of sequences
_MAX_FINISHED = 64  # ended sequences kept for the next batch before a batch is sent for them alone
_LONGEST_PAUSE = 256  # rounds
_MAX_DROPPED = 64  # namespaces dropped by name; beyond, the worker drops all


@dataclass(slots=True, eq=False)
class _Worker:
    key: int
    num_sequences: int = 0
    finished: list[int] = field(default_factory=list)  # sequences it holds and may forget
    num_missed: int = 0  # consecutive results that did not come in time
    paused_until: int = 0  # round id
    # Namespaces to drop, until the worker has answered a batch that named them. What a new worker learnt before it
    # joined, and which drops it missed, is unknown: it drops all.
    dropped: list[str] = field(default_factory=list)
    drops_all: bool = True
    drops_sent: int | None = None  # id of the round whose batch named all of them


def _key(worker_id: str) -> int:
    return int.from_bytes(blake2b(worker_id.encode(), digest_size=8).digest(), "little")


def _score(key: int, seq_id: int) -> int:
    """64-bit mix of worker and sequence (the finalizer of SplitMix64): equal in every process."""
    return splitmix64.finalize(key ^ (seq_id * splitmix64.STEP))


class DraftWorkers:
    """The workers of one pool.

    A sequence keeps its worker as long as that lives. A new sequence goes to the worker that rendezvous hashing ranks
    first among those with at most 1.25 times the mean load (Thaler and Ravishankar 1998; bounded loads after Mirrokni
    et al. 2018). A worker that misses its deadline is left out for 1, 2, 4, ... 256 rounds."""

    def __init__(self, pool: int = 0) -> None:
        """pool: index of the pool."""
        self._pool = pool
        self._workers: dict[str, _Worker] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def set_workers(self, worker_ids: SequenceOf[str], sequences: Iterable[Sequence]) -> None:
        """The connected workers. Sequences of a lost worker get another one when they next draft."""
        previous = self._workers
        self._workers = {worker_id: previous.get(worker_id) or _Worker(_key(worker_id)) for worker_id in worker_ids}
        for sequence in sequences:
            held = sequence.drafts.pools.get(self._pool)
            if held is not None and held.worker is not None and held.worker not in self._workers:
                held.leave_worker()

    def worker_for(self, sequence: Sequence, round_id: int) -> str | None:
        """The sequence's worker, chosen now if it has none; None if there are no workers, its worker is paused, or the
        pool may not draft for it."""
        held = sequence.drafts.pools.get(self._pool)
        if held is None or not self._workers:
            return None
        if held.worker is None:
            total = sum(worker.num_sequences for worker in self._workers.values()) + 1
            limit = math.ceil(total * _LOAD_SLACK / len(self._workers))
            roomy = [item for item in self._workers.items() if item[1].num_sequences < limit]
            seq_id = sequence.seq_id
            worker_id, worker = max(roomy, key=lambda item: (_score(item[1].key, seq_id), item[0]))
            worker.num_sequences += 1
            held.worker = worker_id
            held.known = 0
        return None if self._workers[held.worker].paused_until > round_id else held.worker

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended or been renamed; its worker is notified with the next batch."""
        held = sequence.drafts.pools.get(self._pool)
        if held is None:
            return
        worker = self._workers.get(held.worker or "")
        if worker is not None:
            worker.num_sequences -= 1
            worker.finished.append(sequence.seq_id)
        held.leave_worker()

    def batches(
        self, items: dict[str, list[DraftItem]], worth: Mapping[str, np.ndarray], round_id: int, is_idle: bool
    ) -> dict[str, DraftBatch]:
        """A batch for each worker with items, dropped namespaces, or many finished sequences (when idle: any). worth:
        of a forward, by worker."""
        batches: dict[str, DraftBatch] = {}
        for worker_id, worker in self._workers.items():
            wanted = items.get(worker_id)
            has_finished = len(worker.finished) >= _MAX_FINISHED or (is_idle and worker.finished)
            if wanted or has_finished or _has_drops(worker):
                batches[worker_id] = DraftBatch(
                    round_id,
                    wanted or [],
                    worker.finished,
                    dropped=list(worker.dropped),
                    drops_all=worker.drops_all,
                    worth=worth.get(worker_id, no_worth()),
                )
                worker.finished = []
                worker.drops_sent = round_id
        return batches

    def drop_namespace(self, namespace: str) -> None:
        """Have all workers drop what they learnt in a namespace. The notice goes out at once, and again with every
        batch until the worker has answered one: later drafts use nothing of what was dropped."""
        for worker in self._workers.values():
            worker.drops_sent = None
            if namespace not in worker.dropped:
                worker.dropped.append(namespace)
            if len(worker.dropped) > _MAX_DROPPED:
                worker.dropped, worker.drops_all = [namespace], True

    @property
    def has_notices(self) -> bool:
        """Whether a worker has yet to be notified of ended sequences or of namespaces to drop."""
        return any(worker.finished or _has_drops(worker) for worker in self._workers.values())

    def count_answer(self, worker_id: str, round_id: int) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.num_missed = 0
            if worker.drops_sent == round_id:
                worker.dropped, worker.drops_all = [], False

    def count_miss(self, worker_id: str, round_id: int) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.paused_until = round_id + 1 + min(_LONGEST_PAUSE, 1 << min(worker.num_missed, 16))
            worker.num_missed += 1


def _has_drops(worker: _Worker) -> bool:
    """Whether the worker must be notified of dropped namespaces. A worker that has just joined is notified with its
    first items."""
    return bool(worker.dropped) and worker.drops_sent is None
