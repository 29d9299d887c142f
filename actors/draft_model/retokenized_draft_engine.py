"""A draft model whose vocabulary is not the target's: it drafts by way of the text.

The target's committed tokens become text and the text becomes tokens of the draft model; its guess goes the way back.
The target verifies what comes out like any other draft. That is string-level exact match (Timor et al. 2025,
"Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies").

The target's noise is per token of its own vocabulary and says nothing about the draft model's tokens, so the guess is
the greedy chain, whatever the request's sampling is. Given the committed tokens it is no random draw: under
`acceptance: rejection` each token comes with all the mass, q = 1, which the accept test takes as it takes any other q.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Sequences

import msgspec
import numpy as np

from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.retokenized_sequence import RetokenizedSequence
from actors.draft_tree import DraftTree, TopProbs
from actors.engine.block_pool import BlockPool
from actors.engine.sequence_table import distinct
from actors.messages import DraftBatch, DraftItem, DraftResult, SamplingParams, SequenceDelta, SequenceStart
from actors.models.token_text import TokenText

_GREEDY = SamplingParams(seed=0, temperature=0.0)
# Draft tokens guessed for each token wanted, at most: one-byte tokens against long words would take too long.
_MAX_RATIO = 3.0


class RetokenizedDraftEngine:
    """A `DraftEngine` that speaks the target's tokens, around one that speaks its own.

    Sequences are begun, continued and found stale by the same rules. Where committed text spells otherwise with more
    text behind it, the inner engine begins the sequence anew, and its prefix cache has all but the end.
    """

    def __init__(self, inner: DraftEngine, target: TokenText, draft: TokenText) -> None:
        self.num_unaligned = 0  # guesses of which nothing came out in the target's tokens
        self._inner = inner
        self._target, self._draft = target, draft
        self._sequences: dict[int, RetokenizedSequence] = {}

    @property
    def pool(self) -> BlockPool:
        return self._inner.pool

    def draft(self, batch: DraftBatch) -> DraftResult:
        """One chain per item, in order; empty where the draft model cannot follow or its guess does not realign."""
        started = time.perf_counter()
        for seq_id in batch.finished:
            self._sequences.pop(seq_id, None)
        stale: list[int] = []
        items: list[DraftItem] = []
        for item in distinct(batch.items):
            if self._bring_up_to_date(item):
                items.append(item)
            else:
                stale.append(item.delta.seq_id)
        guesses = self._guess(items, batch, stale)
        trees = [self._realign(item, guesses.get(item.delta.seq_id)) for item in items]
        seq_ids = [item.delta.seq_id for item in items]
        return DraftResult(
            round_id=batch.round_id,
            seq_ids=seq_ids,
            trees=trees,
            stale_seq_ids=stale,
            elapsed_s=time.perf_counter() - started,
        )

    def answer(self, batch: DraftBatch) -> DraftResult:
        """`draft` under the name that every worker's engine has."""
        return self.draft(batch)

    def clear(self) -> None:
        """Forget every sequence; their next deltas are answered stale."""
        self._sequences.clear()
        self._inner.clear()

    def check_integrity(self) -> str | None:
        """Text of the first contradiction in a sequence or in the inner engine, or None."""
        for seq_id, sequence in self._sequences.items():
            error = sequence.check_integrity()
            if error is not None:
                return f"sequence {seq_id}: {error}"
        return self._inner.check_integrity()

    def _bring_up_to_date(self, item: DraftItem) -> bool:
        """False, and the sequence forgotten, if the delta is stale."""
        delta = item.delta
        sequence = self._sequences.get(delta.seq_id)
        if delta.start == 0 and item.begin is not None and len(delta.token_ids):
            sequence = RetokenizedSequence(item.begin, self._target, self._draft)
            self._sequences[delta.seq_id] = sequence
        elif delta.start == 0 or sequence is None or sequence.num_tokens != delta.start:
            self._sequences.pop(delta.seq_id, None)
            return False
        sequence.extend(delta.token_ids.tolist())
        return True

    def _guess(self, items: Sequences[DraftItem], batch: DraftBatch, stale: Sequences[int]) -> dict[int, DraftTree]:
        """The inner engine's chains by sequence, of those that it can follow."""
        asked: list[DraftItem] = []
        unfit: list[int] = []
        for item in items:
            asking = self._inner_item(item)
            if asking is None:
                unfit.append(item.delta.seq_id)
            else:
                asked.append(asking)
        for item in asked:
            self._sequences[item.delta.seq_id].num_sent = 0  # should the engine fail or have no room, begin anew
        result = self._inner.draft(
            DraftBatch(
                round_id=batch.round_id,
                items=asked,
                finished=[*batch.finished, *stale, *unfit],
                dropped=batch.dropped,
                drops_all=batch.drops_all,
            )
        )
        for seq_id in unfit:
            self._sequences[seq_id].num_sent = 0
        for seq_id in result.seq_ids:
            self._sequences[seq_id].num_sent = len(self._sequences[seq_id].draft_ids)
        return dict(zip(result.seq_ids, result.trees, strict=True))

    def _inner_item(self, item: DraftItem) -> DraftItem | None:
        """None where the draft model has nothing to begin with."""
        sequence = self._sequences[item.delta.seq_id]
        depth = _depth(item)
        if depth:
            # As many draft tokens as the text so far took for that many of the target's, and one to see what the last
            # one becomes.
            ratio = len(sequence.draft_ids) / sequence.num_tokens
            depth = math.ceil(depth * min(ratio, _MAX_RATIO)) + 1
        if sequence.num_sent == len(sequence.draft_ids):
            sequence.num_sent = 0  # nothing new to compute, and logits are not kept
        token_ids = np.asarray(sequence.draft_ids[sequence.num_sent :], np.int32)
        if not len(token_ids):
            return None
        begin = None
        if sequence.num_sent == 0:
            begin = SequenceStart(_GREEDY, len(token_ids), sequence.begin.namespace)
        return DraftItem(SequenceDelta(item.delta.seq_id, sequence.num_sent, token_ids), depth, begin, depth)

    def _realign(self, item: DraftItem, guess: DraftTree | None) -> DraftTree:
        if guess is None or not len(guess.token_ids):
            return DraftTree.empty()
        sequence = self._sequences[item.delta.seq_id]
        is_rejection = sequence.begin.sampling.acceptance == "rejection"
        tree = sequence.realign(guess, _depth(item) if is_rejection else item.max_nodes)
        if tree is None:
            self.num_unaligned += 1
            return DraftTree.empty()
        if is_rejection:
            probs = TopProbs(tree.token_ids, np.ones(len(tree.token_ids), np.float32), 1)
            return msgspec.structs.replace(tree, probs=probs)
        return tree


def _depth(item: DraftItem) -> int:
    return min(item.max_depth or item.max_nodes, item.max_nodes)
