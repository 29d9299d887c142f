"""Sequences that an engine decodes with draft trees, as a router would have it do."""

from __future__ import annotations

import numpy as np

from actors.draft_tree import DraftTree
from actors.engine.target_engine import TargetEngine
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem, VerifyResult

_PREFILL_ROWS = 4096


class Decoding:
    """`count` sequences of random prompts. Trees are complete binary trees of random tokens."""

    def __init__(
        self,
        engine: TargetEngine,
        count: int,
        context: int,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        head_nodes: int = -1,
    ) -> None:
        """head_nodes: that the target's head drafts in each round for the next one; their trees are in `drafts`."""
        self.engine = engine
        self.head_nodes = head_nodes
        self.drafts: dict[int, DraftTree] = {}  # by sequence id
        self.rng = np.random.default_rng(seed)
        vocab = min(engine.vocab_size, 50_000)
        self.texts = [self.rng.integers(0, vocab, context).tolist() for _ in range(count)]
        self.prompt_length = context
        self.accepted = 0
        self._vocab = vocab
        self._known = [0] * count
        self._sampling = sampling or SamplingParams(seed=seed, temperature=0.0)
        self._number = 0
        self.prefill()

    def prefill(self) -> None:
        """Until every sequence has one new token. Every prompt takes more than one round."""
        while min(map(len, self.texts)) == self.prompt_length:
            each = max(1, min(_PREFILL_ROWS // len(self.texts), -(-self.prompt_length // 2)))
            self.round(0, rows=each)

    def tree(self, index: int, nodes: int) -> DraftTree:
        # Distinct, and cheap: the host makes trees within the rounds that are measured.
        first = int(self.rng.integers(self._vocab)) if nodes else 0
        ids = ((first + np.arange(nodes)) % self._vocab).astype(np.int32)
        parents = ((np.arange(nodes) + 1) // 2 - 1).astype(np.int32)
        return DraftTree(ids, parents, np.full(nodes, 0.5, np.float32))

    def round(self, nodes: int, rows: int = 1) -> VerifyResult:
        self._number += 1
        items = []
        for index, text in enumerate(self.texts):
            known = self._known[index]
            begin = None if known else SequenceStart(self._sampling, self.prompt_length)
            delta = SequenceDelta(index + 1, known, np.array(text[known:], np.int32))
            items.append(VerifyItem(delta, rows, self.tree(index, nodes), begin, head_nodes=self.head_nodes))
            self._known[index] = len(text)
        result = self.engine.verify(VerifyBatch(self._number, items))
        assert not result.stale_seq_ids
        assert not result.starved_seq_ids, "the KV cache is too small for this experiment"
        self.drafts = dict(zip(result.drafted_seq_ids, result.drafts, strict=True))
        for verdict in result.verdicts:
            if verdict.next_token >= 0:
                tree = items[verdict.seq_id - 1].tree
                assert tree is not None
                self.texts[verdict.seq_id - 1] += [*tree.token_ids[verdict.path].tolist(), verdict.next_token]
                self.accepted += len(verdict.path)
        return result

    def until(self, tokens: int, nodes: int) -> list[list[int]]:
        """The first `tokens` tokens of every sequence."""
        while min(map(len, self.texts)) < self.prompt_length + tokens:
            self.round(nodes)
        return [self.output(index)[:tokens] for index in range(len(self.texts))]

    def output(self, index: int) -> list[int]:
        return self.texts[index][self.prompt_length :]

    def finish(self) -> None:
        self.engine.verify(VerifyBatch(0, [], list(range(1, len(self.texts) + 1))))


class Drafted(Decoding):
    """Trees hold the true continuation for some tokens, beside wrong branches; with a head, they are the head's."""

    def __init__(
        self,
        engine: TargetEngine,
        truths: list[list[int]],
        prompts: list[list[int]],
        right: int,
        sampling: SamplingParams | None = None,
        head_nodes: int = -1,
    ) -> None:
        self._truths, self._right = truths, right
        self._prompts = prompts
        super().__init__(engine, len(prompts), len(prompts[0]), sampling, head_nodes=head_nodes)

    def prefill(self) -> None:
        self.texts = [list(prompt) for prompt in self._prompts]
        super().prefill()

    def tree(self, index: int, nodes: int) -> DraftTree:
        if self.head_nodes > 0:
            return self.drafts.get(index + 1, DraftTree.empty())
        tree = super().tree(index, nodes)
        done = len(self.texts[index]) - self.prompt_length
        rest = (self._truths or [[]] * len(self.texts))[index][done : done + self._right]
        path = [nodes - 1] if nodes else []
        while path and tree.parents[path[-1]] >= 0:  # from the last leaf to the root
            path.append(int(tree.parents[path[-1]]))
        for node, token in zip(reversed(path), rest, strict=False):
            tree.token_ids[node] = token
        return tree
