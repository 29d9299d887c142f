"""A CPU drafter and a draft worker that draft chains by a function of the text."""

from collections.abc import Callable

import numpy as np

from actors.draft_tree import DraftTree
from actors.drafters.contract import CpuDrafter, DraftContext
from actors.messages import DraftBatch, DraftResult
from paceline_testing.toy_target import ToyTarget

Guess = Callable[[list[int], int], list[int]]  # draft tokens, by the committed tokens and the most that may be drafted


def right(target: ToyTarget, count: int = 16) -> Guess:
    """What the target will say, at most so many tokens."""
    return lambda tokens, max_nodes: target.text_after(tokens, min(count, max_nodes))


class ChainDrafter(CpuDrafter):
    name = "chain"

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self.asked: list[list[int]] = []  # sequence ids of each call

    def propose(self, contexts: list[DraftContext]) -> list[DraftTree]:
        self.asked.append([context.seq_id for context in contexts])
        found = [np.array(self._guess(one.tokens.tolist(), one.max_nodes), np.int32) for one in contexts]
        return [DraftTree.chain(tokens, np.full(len(tokens), 0.9, np.float32)) for tokens in found]


class ToyDraftWorker:
    """Keeps the protocol's books."""

    def __init__(self, guess: Guess) -> None:
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
