"""A draft worker without a model that keeps the protocol's books."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from actors.draft_tree import DraftTree
from actors.messages import DraftBatch, DraftResult


class ToyDraftWorker:
    """Drafts chains, by a function of the committed tokens and the number of nodes asked for."""

    def __init__(self, guess: Callable[[list[int], int], list[int]]) -> None:
        self.guess = guess
        self.sequences: dict[int, list[int]] = {}
        self.batches: list[DraftBatch] = []

    def draft(self, batch: DraftBatch) -> DraftResult:
        self.batches.append(batch)
        for seq_id in batch.finished:
            self.sequences.pop(seq_id, None)
        seq_ids, trees, stale = [], [], []
        for item in batch.items:
            delta = item.delta
            assert (delta.start == 0) == (item.begin is not None)
            known = self.sequences.get(delta.seq_id, []) if delta.start else []
            if len(known) != delta.start:
                stale.append(delta.seq_id)
                continue
            tokens = self.sequences[delta.seq_id] = known + delta.token_ids.tolist()
            nodes = np.array(self.guess(tokens, item.max_nodes), np.int32)
            seq_ids.append(delta.seq_id)
            trees.append(DraftTree.chain(nodes, (0.8 ** np.arange(1, len(nodes) + 1)).astype(np.float32)))
        return DraftResult(batch.round_id, seq_ids, trees, stale, 0.001)
