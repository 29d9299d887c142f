"""A draft model that guesses a chain or a tree per sequence: the drafter behind the name `draft_model`, and, with the
lookahead drafter beside it, behind `ouroboros`.

It draws with the target's own noise, `argmax(process(q) + G)` (design: coupled sampling), so no probabilities travel;
with `acceptance: rejection` it draws from its truncated distribution instead and sends that along
(Leviathan et al. 2023). Siblings are the tokens that come next in `process(q) + G`: those that the target will draw
where its logits are a little different. Trees grow best first, as in EAGLE-2 (Li et al. 2024).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from actors.engine.batch import SequenceRows
from actors.engine.block_pool import BlockPool
from actors.engine.growing_tree import ROOT, GrowingTree
from actors.engine.lookahead_drafter import LookaheadDraft, LookaheadDrafter, LookaheadOptions
from actors.engine.model_runner import ModelRunner
from actors.engine.options import EngineOptions
from actors.engine.runner import make_runner
from actors.engine.sequence import Sequence
from actors.engine.sequence_table import SequenceTable, distinct
from actors.messages import (
    DraftBatch,
    DraftItem,
    DraftResult,
    SequenceStart,
    TopProbs,
    TreeMessage,
    no_tokens,
    no_tree,
)
from actors.models.loader import length_limits
from actors.sampling.sampler import RowSampling, draft_with_probs, likeliest_tokens, rows_for

# Pairs sent per node with acceptance == "rejection"; q is defined as these, so few suffice (256 bytes a node).
_NUM_PROBS = 32
# Of one tree, whatever a message asks for; a cluster's configuration allows as many.
_MAX_NODES = 256
# Rows a forward of prompts; longer ones are computed in several.
_MAX_PREFILL_ROWS = 512


@dataclass(slots=True)
class _Draft:
    """One sequence being drafted for."""

    sequence: Sequence
    max_nodes: int
    tree: GrowingTree
    probs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def draws_from_probs(self) -> bool:
        return _draws_from_probs(self.sequence)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of logits: what comes behind one node of a sequence's tree."""

    draft: _Draft
    node: int


class DraftEngine:
    """Sequences, their KV blocks and the draft model. One call of `draft` answers one `DraftBatch`."""

    def __init__(
        self,
        model: PreTrainedModel,
        options: EngineOptions,
        vocab_map: torch.Tensor | None = None,
        lookahead: LookaheadOptions | None = None,
    ) -> None:
        """vocab_map int64 [outputs]: target token id of each column of the model's logits; None: they are equal.
        lookahead None: its defaults."""
        self.pool = BlockPool(options.num_blocks, options.block_size, options.prefix_cache)
        self._runner = make_runner(model, options.num_blocks * options.block_size)
        self._table = SequenceTable(self.pool, self._runner.kv, self._runner.sequence_type)
        self._vocab_map = vocab_map
        self._max_len, self._max_side_len = length_limits(model.config)
        self._num_ids = int(model.get_input_embeddings().num_embeddings)
        self._unfit: set[int] = set()  # sequences that the model cannot read
        self._lookahead: LookaheadDrafter | None = None
        if isinstance(self._runner, ModelRunner):
            self._lookahead = LookaheadDrafter(self._runner, lookahead or LookaheadOptions(), self._max_len, vocab_map)

    @torch.inference_mode()
    def draft(self, batch: DraftBatch) -> DraftResult:
        """One tree per item, in order; empty where there is no room for the sequence, or where it has tokens or
        positions that the model has not."""
        started = time.perf_counter()
        for seq_id in batch.finished:
            self._table.forget(seq_id)
            self._unfit.discard(seq_id)
        stale: list[int] = []
        unfit: list[int] = []
        drafts: list[_Draft | LookaheadDraft] = []
        for item in distinct(batch.items):
            if not self._fits(item):
                unfit.append(item.delta.seq_id)
                continue
            sequence = self._table.find(item.delta, item.begin)
            if sequence is None:
                stale.append(item.delta.seq_id)
            elif self._table.bring_up_to_date(sequence, item.delta, len(sequence.tokens) + len(item.delta.token_ids)):
                drafts.append(self._start(sequence, item))
            else:
                # Forgotten, so that the next delta is answered stale and starts over when there is room.
                self._table.forget(item.delta.seq_id)
        self._prefill(drafts)
        self._grow([draft for draft in drafts if isinstance(draft, _Draft)])
        if self._lookahead is not None:
            self._lookahead.grow([draft for draft in drafts if isinstance(draft, LookaheadDraft)])
        for draft in drafts:
            draft.sequence.publish()
        return DraftResult(
            batch.round_id,
            [*(draft.sequence.seq_id for draft in drafts), *unfit],
            [*(self._tree_message(draft) for draft in drafts), *(no_tree() for _ in unfit)],
            stale,
            time.perf_counter() - started,
        )

    def _fits(self, item: DraftItem) -> bool:
        """Whether the model can read the sequence. One that it cannot read is answered, or it would come whole again
        every other round; in a forward it would take all the others of its batch with it."""
        delta, begin = item.delta, self._table.begin_of(item)
        if delta.start == 0:
            self._unfit.discard(delta.seq_id)
        if delta.seq_id not in self._unfit:
            ids = delta.token_ids
            has_ids = not len(ids) or (ids.min() >= 0 and ids.max() < self._num_ids)
            if has_ids and (begin is None or delta.start + len(ids) <= self._most_tokens(begin)):
                return True
            self._unfit.add(delta.seq_id)
            self._table.forget(delta.seq_id)
        return False

    def _most_tokens(self, begin: SequenceStart) -> int:
        """Tokens of a sequence that the model has positions for."""
        if self._max_side_len is None:
            return self._max_len
        # A decoder's first position is that of the token before the output.
        return begin.num_prompt_tokens + self._max_side_len - 1 if begin.num_prompt_tokens <= self._max_side_len else 0

    def _start(self, sequence: Sequence, item: DraftItem) -> _Draft | LookaheadDraft:
        max_nodes = min(item.max_nodes, _MAX_NODES)
        max_depth = min(item.max_depth or max_nodes, max_nodes)
        # What is sent under rejection are draws from q with their probabilities, which phrases have not.
        if item.method == "tree" or _draws_from_probs(sequence) or self._lookahead is None:
            # The last guesses of a tree are not computed.
            room = self._most_tokens(sequence.begin) - sequence.length + 1
            return _start_tree(sequence, max_nodes, min(max_depth, room), item.branch)
        self._lookahead.learn(sequence, len(item.delta.token_ids))
        return self._lookahead.start(sequence, max_nodes, max_depth)

    def _tree_message(self, draft: _Draft | LookaheadDraft) -> TreeMessage:
        if isinstance(draft, LookaheadDraft):
            assert self._lookahead is not None
            return self._lookahead.finished(draft)
        return _tree_message(draft)

    def _prefill(self, drafts: list[_Draft | LookaheadDraft]) -> None:
        """Compute committed tokens until at most one chunk is left, which goes with the first guess. Where no guess is
        wanted only the last token is left, whose logits the first guess will want."""
        for draft in drafts:
            most_left = _MAX_PREFILL_ROWS if draft.max_nodes else 1
            while (pending := draft.sequence.num_pending) > most_left:
                count = min(pending - 1, _MAX_PREFILL_ROWS)
                self._forward([SequenceRows(draft.sequence, count, no_tokens(), no_tokens())])

    def _grow(self, drafts: list[_Draft]) -> None:
        """A forward for each depth, of all sequences and all nodes that guesses are wanted behind."""
        while True:
            growing = [(draft, nodes) for draft in drafts if (nodes := draft.tree.expandable())]
            if not growing:
                return
            logits = self._forward([_rows_of(draft, nodes) for draft, nodes in growing])
            rows = [_Row(draft, node) for draft, nodes in growing for node in nodes]
            for draft, nodes in growing:
                draft.tree.begin_step(nodes)
            for from_probs, draw in ((False, self._draw), (True, self._draw_from_probs)):
                chosen = [index for index, row in enumerate(rows) if row.draft.draws_from_probs == from_probs]
                if chosen:
                    draw([rows[index] for index in chosen], logits[chosen])

    def _draw(self, rows: list[_Row], logits: torch.Tensor) -> None:
        most = max(row.draft.tree.branch for row in rows)
        tokens, shares = likeliest_tokens(logits, _row_sampling(rows), most, self._vocab_map)
        for row, guesses in zip(rows, zip(tokens.tolist(), shares.tolist(), strict=True), strict=True):
            for token, share in list(zip(*guesses, strict=True))[: row.draft.tree.branch]:
                if share > 0.0:  # else the token is masked
                    row.draft.tree.add(row.node, token, share)

    def _draw_from_probs(self, rows: list[_Row], logits: torch.Tensor) -> None:
        drawn, ids, probs = draft_with_probs(logits, _row_sampling(rows), _NUM_PROBS, self._vocab_map)
        shares = torch.where(ids == drawn[:, None], probs, 0.0).sum(dim=1)
        for index, row in enumerate(rows):
            row.draft.probs.append((ids[index].to(torch.int32).cpu().numpy(), probs[index].float().cpu().numpy()))
            row.draft.tree.add(row.node, int(drawn[index]), float(shares[index]))

    def _forward(self, parts: list[SequenceRows]) -> torch.Tensor:
        """Compute the rows; logits, [rows, outputs], behind the last committed token of each part that gets so far and
        behind the new nodes of the others."""
        logits = self._runner.run(parts, [_num_wanted(part) for part in parts])
        for part in parts:
            part.sequence.computed(part.count, part.tree_tokens, part.tree_parents)
        return logits

    def answer(self, batch: DraftBatch) -> DraftResult:
        """`draft` under the name that every worker's engine has."""
        return self.draft(batch)

    def clear(self) -> None:
        """Forget every sequence; their next deltas are answered stale."""
        self._table.clear()
        self._unfit.clear()

    def check_integrity(self) -> str | None:
        error = self._table.check_integrity()
        return error if error or self._lookahead is None else self._lookahead.pool.check_integrity()


def _draws_from_probs(sequence: Sequence) -> bool:
    return sequence.sampling.params.acceptance == "rejection"


def _start_tree(sequence: Sequence, max_nodes: int, max_depth: int, branch: int) -> _Draft:
    # The accept test of rejection is for one token drawn from q, and its residual for the next draw after that one
    # failed: so there is a chain, whatever was asked for.
    branch = 1 if _draws_from_probs(sequence) else branch
    tree = GrowingTree(max_nodes, max_depth, branch)
    if sequence.reserve(sequence.length + tree.max_computed):
        return _Draft(sequence, max_nodes, tree)
    return _Draft(sequence, 0, GrowingTree(0, 0, 1))


def _rows_of(draft: _Draft, nodes: Sequences[int]) -> SequenceRows:
    if nodes[0] == ROOT:
        return SequenceRows(draft.sequence, draft.sequence.num_pending, no_tokens(), no_tokens())
    tokens, parents = draft.tree.computed(nodes)
    return SequenceRows(draft.sequence, 0, tokens, parents, len(tokens) - len(nodes))


def _num_wanted(part: SequenceRows) -> int:
    if not part.count:
        return part.num_rows
    return 1 if part.count == part.sequence.num_pending else 0


def _row_sampling(rows: list[_Row]) -> RowSampling:
    samplings = [row.draft.sequence.sampling for row in rows]
    paths = [row.draft.tree.path(row.node) for row in rows]
    positions = np.asarray([row.draft.sequence.length + len(path) for row, path in zip(rows, paths, strict=True)])
    return rows_for(samplings, np.arange(len(rows)), positions, paths)


def _tree_message(draft: _Draft) -> TreeMessage:
    tree = draft.tree.finished()
    probs = None
    if draft.probs:
        ids, shares = (np.concatenate(parts) for parts in zip(*draft.probs, strict=True))
        probs = TopProbs(ids, shares, len(draft.probs[0][0]))
    return TreeMessage(tree.token_ids, tree.parents, tree.confidence, probs)
