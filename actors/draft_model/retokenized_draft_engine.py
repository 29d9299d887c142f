"""Drafts with a draft model whose vocabulary differs from the target's, by way of the text.

The target's committed tokens are decoded, the text is encoded for the draft model, and its guess goes the way back. The
target verifies it like any other draft. This is string-level exact match (Timor et al. 2025, "Accelerating LLM
Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies").

The target's sampling noise is defined on its vocabulary, so the guess is the greedy chain for any sampling parameters.
Under `acceptance: rejection` each token of a chain is sent with q = 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Sequences

import msgspec
import numpy as np
import torch

from actors.draft_model.draft_engine import DraftEngine
from actors.draft_model.retokenized_sequence import RetokenizedSequence
from actors.draft_tree import DraftTree, TopProbs
from actors.draft_worth import no_worth, scaled
from actors.engine.sequence_table import distinct
from actors.messages import DraftBatch, DraftItem, DraftResult, SamplingParams, SequenceDelta, SequenceStart
from actors.models.token_text import TokenText

_GREEDY = SamplingParams(seed=0, temperature=0.0)
_MAX_RATIO = 3.0  # limit of draft tokens guessed for each token wanted


class RetokenizedDraftEngine:
    """A `DraftEngine` for the target's tokens, around one for the draft model's tokens.

    Sequences start, continue and go stale by the same rules. If more text changes the tokens of earlier text, the inner
    engine restarts the sequence; its prefix cache has all but the end.
    """

    def __init__(self, inner: DraftEngine, target: TokenText, draft: TokenText) -> None:
        self.pool = inner.pool
        self._inner = inner
        self._target, self._draft = target, draft
        self._sequences: dict[int, RetokenizedSequence] = {}

    @property
    def device(self) -> torch.device:
        return self._inner.device

    @property
    def records_launches(self) -> bool:
        return self._inner.records_launches

    def draft(self, batch: DraftBatch) -> DraftResult:
        """One chain for each item, in order; empty if the draft model cannot follow or its guess does not realign."""
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
        found = self._guess(items, batch, stale)
        guesses = dict(zip(found.seq_ids, found.trees, strict=True))
        trees = [self._realign(item, guesses.get(item.delta.seq_id)) for item in items]
        seq_ids = [item.delta.seq_id for item in items]
        return DraftResult(
            round_id=batch.round_id,
            seq_ids=seq_ids,
            trees=trees,
            stale_seq_ids=stale,
            elapsed_s=time.perf_counter() - started,
            is_parallel=found.is_parallel,
            num_forwards=found.num_forwards,
            is_new_shape=found.is_new_shape,
        )

    answer = draft  # the name that every worker's engine has

    def clear(self) -> None:
        """Forget every sequence; their next deltas are answered stale."""
        self._sequences.clear()
        self._inner.clear()

    def _bring_up_to_date(self, item: DraftItem) -> bool:
        """Returns False and forgets the sequence if the delta is stale."""
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

    def _guess(self, items: Sequences[DraftItem], batch: DraftBatch, stale: Sequences[int]) -> DraftResult:
        """The inner engine's chains, of the sequences that it can follow."""
        asked: list[DraftItem] = []
        unfit: list[int] = []
        for item in items:
            asking = self._inner_item(item)
            if asking is None:
                unfit.append(item.delta.seq_id)
            else:
                asked.append(asking)
        for item in asked:
            self._sequences[item.delta.seq_id].num_sent = 0  # restart if the engine fails or has no room
        result = self._inner.draft(
            DraftBatch(
                round_id=batch.round_id,
                items=asked,
                finished=[*batch.finished, *stale, *unfit],
                dropped=batch.dropped,
                drops_all=batch.drops_all,
                worth=self._inner_worth(asked, batch.worth),
            )
        )
        for seq_id in unfit:
            self._sequences[seq_id].num_sent = 0
        for seq_id in result.seq_ids:
            self._sequences[seq_id].num_sent = len(self._sequences[seq_id].draft_ids)
        return result

    def _inner_worth(self, asked: Sequences[DraftItem], worth: np.ndarray) -> np.ndarray:
        """`DraftBatch.worth` of the inner engine: a draft token brings part of a token of the target, in proportion to
        the tokens of the texts so far. Under rejection every forward pays, because the inner engine would end a draft
        by its tokens, on which its time must not depend."""
        sequences = [self._sequences[item.delta.seq_id] for item in asked if item.max_nodes]
        if not sequences or any(sequence.begin.sampling.acceptance == "rejection" for sequence in sequences):
            return no_worth()
        num_draft_tokens = sum(len(sequence.draft_ids) for sequence in sequences)
        return scaled(worth, sum(sequence.num_tokens for sequence in sequences) / num_draft_tokens)

    def _inner_item(self, item: DraftItem) -> DraftItem | None:
        """The item for the inner engine, or None if the draft model has no token of the text."""
        sequence = self._sequences[item.delta.seq_id]
        depth = _depth(item)
        if depth:
            # In proportion to the tokens of the text so far, and one more to complete the last token.
            ratio = len(sequence.draft_ids) / sequence.num_tokens
            depth = math.ceil(depth * min(ratio, _MAX_RATIO)) + 1
        if sequence.num_sent == len(sequence.draft_ids):
            sequence.num_sent = 0  # no new tokens: restart, because logits are not kept
        token_ids = np.asarray(sequence.draft_ids[sequence.num_sent :], np.int32)
        if not len(token_ids):
            return None
        begin = None
        if sequence.num_sent == 0:
            begin = SequenceStart(_GREEDY, len(token_ids), sequence.begin.namespace)
        delta = SequenceDelta(item.delta.seq_id, sequence.num_sent, token_ids)
        return DraftItem(delta, depth, begin, depth, min_confidence=item.min_confidence)

    def _realign(self, item: DraftItem, guess: DraftTree | None) -> DraftTree:
        if guess is None or not len(guess.token_ids):
            return DraftTree.empty()
        sequence = self._sequences[item.delta.seq_id]
        is_rejection = sequence.begin.sampling.acceptance == "rejection"
        tree = sequence.realign(guess, _depth(item) if is_rejection else item.max_nodes)
        if tree is None:
            return DraftTree.empty()
        if is_rejection and item.method == "tree":
            probs = TopProbs(tree.token_ids, np.ones(len(tree.token_ids), np.float32), 1)
            return msgspec.structs.replace(tree, probs=probs)
        return tree


def _depth(item: DraftItem) -> int:
    return min(item.max_depth or item.max_nodes, item.max_nodes)
