"""Draft workers in simulated time: each drafts for one router after the other, and is right as often as it is told."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from actors.draft_tree import DraftTree
from actors.messages import DraftBatch, DraftItem, DraftResult
from cluster.simulate.events import Events, Server
from cluster.simulate.options import DraftOptions
from cluster.simulate.scripts import Script, Scripts


@dataclass(slots=True)
class _Known:
    """What a worker holds of a sequence."""

    script: Script
    first: int  # position of the answer's first token
    length: int


@dataclass(slots=True)
class DraftWorker:
    server: Server
    started_at: float
    known: dict[tuple[str, int], _Known] = field(default_factory=dict)  # by router and sequence


class DraftPool:
    """The workers of one draft model. `on_change` is called with their ids whenever some come or go."""

    def __init__(
        self, events: Events, scripts: Scripts, options: DraftOptions, seed: int, on_change: Callable[[], object]
    ) -> None:
        self.workers: dict[str, DraftWorker] = {}
        self.busy_s = 0.0  # of all workers there have been
        self._events = events
        self._scripts = scripts
        self._options = options
        self._random = random.Random(seed)
        self._on_change = on_change
        self._num_started = 0

    def start(self) -> None:
        self._num_started += 1
        self.workers[f"draft-{self._num_started}"] = DraftWorker(Server(self._events), self._events.now)
        self._on_change()

    def stop(self, worker_id: str) -> None:
        """It ends, or dies."""
        if self.workers.pop(worker_id, None) is not None:
            self._on_change()

    def stop_youngest(self) -> None:
        self.stop(next(reversed(self.workers)))

    def draft(
        self, router_id: str, worker_id: str, batch: DraftBatch, arrives: float
    ) -> tuple[float, DraftResult] | None:
        """A worker's answer and when it is sent; None: the worker is gone."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return None
        for seq_id in batch.finished:
            worker.known.pop((router_id, seq_id), None)
        seq_ids, trees, stale, levels = [], [], [], 0
        num_rows = 0
        for item in batch.items:
            seq_id = item.delta.seq_id
            known = self._caught_up(worker, (router_id, seq_id), item)
            if known is None:
                stale.append(seq_id)
                continue
            num_rows += len(item.delta.token_ids)
            if item.max_nodes:
                tree = self._drafted(known, item)
                seq_ids.append(seq_id)
                trees.append(tree)
                levels = max(levels, len(tree.token_ids))
        cost_s = self._seconds(max(1, num_rows)) + max(0, levels - 1) * self._seconds(len(seq_ids)) if num_rows else 0.0
        self.busy_s += cost_s
        result = DraftResult(batch.round_id, seq_ids, trees, stale, cost_s, num_forwards=levels)
        return worker.server.take(cost_s, arrives), result

    def prompt_seconds(self, batch: DraftBatch, result: DraftResult) -> float:
        """Seconds of a batch for prompts that the worker had not seen before: all, if it drafted nothing."""
        rows = sum(len(item.delta.token_ids) for item in batch.items if not item.delta.start)
        return self._options.row_s * rows if result.num_forwards else result.elapsed_s

    def _caught_up(self, worker: DraftWorker, key: tuple[str, int], item: DraftItem) -> _Known | None:
        delta = item.delta
        if delta.start == 0 and item.begin is not None:
            script = self._scripts[item.begin.sampling.seed]
            worker.known[key] = _Known(script, item.begin.num_prompt_tokens, len(delta.token_ids))
            return worker.known[key]
        known = worker.known.get(key)
        if known is None or known.length != delta.start:
            worker.known.pop(key, None)
            return None
        known.length += len(delta.token_ids)
        return known

    def _drafted(self, known: _Known, item: DraftItem) -> DraftTree:
        """A chain that is right up to some token."""
        depth = min(item.max_depth or item.max_nodes, item.max_nodes)
        position = known.length - known.first
        right = self._options.right
        num_right = 0
        while num_right < depth and self._random.random() < right:
            num_right += 1
        chain = [known.script.token(position + step) for step in range(depth)]
        if num_right < depth:
            chain[num_right] ^= 1  # the draft model is wrong from there on
        return DraftTree.chain(np.array(chain, np.int32), (right ** np.arange(1, depth + 1)).astype(np.float32))

    def _seconds(self, rows: int) -> float:
        return self._options.forward_s + self._options.row_s * (rows - 1)
