"""Asks draft workers over links."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import Histogram

from actors.errors import LinkError
from actors.links.client import AsyncLink
from actors.messages import DraftBatch, DraftResult
from cluster.router.round import Round
from cluster.router.run_round import DraftResults


class LinkedDrafts:
    """Leaves a worker without a link, or without an answer in time, out of the round."""

    def __init__(self, deadline_s: float, lateness: Histogram) -> None:
        """lateness: records how long each round waited for drafts after everything else was ready."""
        self.links: dict[str, AsyncLink] = {}
        self.deadline_s = deadline_s
        self.deadlines_s: dict[int, float] = {}  # of pools with another one, by index
        self._lateness = lateness
        self._awaited: dict[str, asyncio.Task[DraftResult | None]] = {}
        self._unawaited: set[asyncio.Task[DraftResult | None]] = set()

    async def ask(self, round: Round) -> None:
        self._awaited = {}
        for worker_id, batch in round.asked.batches.items():
            link = self.links.get(worker_id)
            if link is None or not link.is_alive:
                continue
            task = asyncio.create_task(self._call(link, batch, self._deadline_of(round, worker_id)))
            if worker_id in round.asked.awaited:
                self._awaited[worker_id] = task
            else:
                self._unawaited.add(task)  # keeps it alive
                task.add_done_callback(self._unawaited.discard)
        if self._awaited:
            await asyncio.sleep(0)  # lets the batches out before this process drafts

    async def collect(self, round: Round) -> DraftResults:
        if not self._awaited:
            return {}
        started = time.perf_counter()
        results = {worker_id: await task for worker_id, task in self._awaited.items()}
        self._lateness.observe(time.perf_counter() - started)
        return results

    def _deadline_of(self, round: Round, worker_id: str) -> float:
        return self.deadlines_s.get(round.asked.pool_of.get(worker_id, 0), self.deadline_s)

    async def _call(self, link: AsyncLink, batch: DraftBatch, deadline_s: float) -> DraftResult | None:
        try:
            answer = await link.call(batch, deadline_s)
        except LinkError:
            return None
        return answer if isinstance(answer, DraftResult) else None
