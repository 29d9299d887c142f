"""The target engine: one forward over the committed tokens and draft trees of a `VerifyBatch`, then acceptance."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from actors.draft_tree import DraftTree, TopProbs
from actors.engine.batch import SequenceRows, trees_of
from actors.engine.block_pool import BlockPool
from actors.engine.device_rounds import DeviceRounds
from actors.engine.draft_trees import Trees, logit_places, tree_paths, valid_trees
from actors.engine.draws import Draws, Emitted
from actors.engine.encoder_decoder_runner import EncoderDecoderRunner
from actors.engine.hidden_state_drafter import HeadRows, HiddenStateDrafter
from actors.engine.host_rounds import HostRounds
from actors.engine.kv_cache import check_device
from actors.engine.model_runner import ModelRunner
from actors.engine.options import EngineOptions
from actors.engine.round_clock import RoundClock
from actors.engine.round_items import READY, STALE, STARVED, record_forward
from actors.engine.runner import make_runner
from actors.engine.sequence import Sequence
from actors.engine.sequence_table import SequenceTable, distinct
from actors.messages import Successors, Verdict, VerifyBatch, VerifyItem, VerifyResult, no_tokens
from actors.sampling.rows import Paths, RowSampling, rows_for
from actors.sampling.verification import verify_rejections

logger = logging.getLogger(__name__)

_NO_TOKENS = no_tokens()
_MOST_RECORDED_DRAFTS = 32


class _Part(msgspec.Struct, frozen=True, gc=False):
    """One sequence of the round and the place of its rows."""

    item: VerifyItem
    rows: SequenceRows
    first_row: int
    emits: bool


@dataclass(slots=True)
class _Outcome:
    """Results of a round before they become a `VerifyResult`."""

    verdicts: list[Verdict] = field(default_factory=list)
    successors: Successors | None = None
    drafted_seq_ids: list[int] = field(default_factory=list)
    drafts: list[DraftTree] = field(default_factory=list)
    head_s: float = 0.0


class TargetEngine:
    """Sequences, their KV blocks and the model. One call of `verify` is one round.

    With tensor parallelism every rank runs the same batches in the same order, and rank 0 says what was sampled. The
    other ranks learn which draft nodes were accepted from the next round's tokens, if not from their own samples.
    """

    def __init__(self, model: PreTrainedModel, options: EngineOptions, rank: int = 0, num_ranks: int = 1) -> None:
        self.options = options
        self.model = model
        self.vocab_size = int(model.get_output_embeddings().out_features)
        self.pool = BlockPool(options.num_blocks, options.block_size, options.prefix_cache)
        self._runner = make_runner(
            model, options.num_slots, options.exact, attention=options.attention, is_eager=options.is_eager
        )
        self._rounds = _rounds_of(self._runner, self.vocab_size)
        self._clock = RoundClock(self._runner.device)
        self._rank, self._num_ranks = rank, num_ranks
        self.eagle_head: HiddenStateDrafter | None = None
        self._eagle_head_has_failed = False
        self._table = SequenceTable(self.pool, self._runner.kv, self._runner.sequence_type)

    def attach_head(self, head: HiddenStateDrafter) -> None:
        """Let a head on this engine's model draft. To be called before the first round."""
        self.eagle_head = head
        if isinstance(self._runner, ModelRunner):
            self._runner.tap = head.tap
            launches = self._runner.launches
            head.launches = None if launches is None else launches.beside(_MOST_RECORDED_DRAFTS)

    @property
    def row_steps(self) -> list[int]:
        """Row counts that forwards of decoding rounds are padded to, ascending; empty: no padding."""
        return list(self._runner.row_steps)

    @property
    def has_head(self) -> bool:
        return self.eagle_head is not None

    @property
    def num_sequences(self) -> int:
        return len(self._table)

    @torch.inference_mode()
    def verify(self, batch: VerifyBatch) -> VerifyResult:
        """Run one round. Unknown sequences and those of another length are returned in `stale_seq_ids`."""
        started = self._clock.mark()
        for seq_id in batch.finished:
            self._table.forget(seq_id)
        items = distinct(batch.items)
        drafts, trees = self._usable_trees(items)
        sequences, taken = self._table.take_in(items, [len(tree.token_ids) for tree in drafts])
        parts = _parts_of(items, sequences, drafts, taken)
        ready, left_out = taken, []
        if len(parts) < len(items):
            ready = taken[taken["status"] == READY]
            left_out = [(item.delta.seq_id, status) for item, status in zip(items, taken["status"], strict=True)]
        num_nodes = sum([len(part.rows.tree_tokens) for part in parts])
        if trees is None or len(parts) < len(items) or num_nodes < len(trees.tokens):
            trees = trees_of([part.rows for part in parts])
        outcome = self._run_round(parts, trees, ready, batch.num_successors) if parts else _Outcome()
        return VerifyResult(
            round_id=batch.round_id,
            verdicts=outcome.verdicts,
            stale_seq_ids=[seq_id for seq_id, status in left_out if status == STALE],
            starved_seq_ids=[seq_id for seq_id, status in left_out if status == STARVED],
            free_blocks=self.pool.num_free,
            total_blocks=self.pool.num_blocks,
            rows=sum([part.rows.num_rows for part in parts]),
            elapsed_s=self._clock.seconds_since(started) - outcome.head_s,
            successors=outcome.successors,
            drafted_seq_ids=outcome.drafted_seq_ids,
            drafts=outcome.drafts,
            head_s=outcome.head_s,
        )

    def _usable_trees(self, items: Sequences[VerifyItem]) -> tuple[list[DraftTree], Trees | None]:
        """The tree of each item, an empty one where it cannot be verified; and the trees joined, if that is known."""
        drafts = [item.tree for item in items]
        are_valid, trees = valid_trees(drafts, self.vocab_size)
        for index, tree in enumerate(drafts):
            if tree.probs is not None and are_valid[index]:
                begin = self._table.begin_of(items[index])
                is_rejection = begin is not None and begin.sampling.acceptance == "rejection"
                are_valid[index] = not is_rejection or _fits_chain(tree.probs, tree)
        if all(are_valid):
            return drafts, trees
        return [tree if is_valid else DraftTree.empty() for tree, is_valid in zip(drafts, are_valid, strict=True)], None

    def _run_round(self, parts: Sequences[_Part], trees: Trees, ready: np.ndarray, num_successors: int) -> _Outcome:
        """trees: of all parts. ready: ITEM, of each part."""
        emitting = [part for part in parts if part.emits]
        if self.eagle_head is not None:
            self.eagle_head.computed(np.concatenate([_slots(part.rows) for part in parts]))
            if any(part.item.head_nodes >= 0 for part in parts):
                self.eagle_head.tap.open()
        wanted = [1 + len(part.rows.tree_tokens) if part.emits else 0 for part in parts]
        draws = self._draws(emitting, trees, num_successors)
        emitted = self._rounds.run([part.rows for part in parts], wanted, draws)
        outcome, outcomes = _Outcome(), {}
        if draws is not None and emitted is not None:
            outcomes = self._outcomes(emitting, draws, emitted)
            outcome.successors = emitted.successors
        if self.eagle_head is not None:
            self._draft(self.eagle_head, parts, outcomes, outcome)
        if record_forward(ready, trees.tokens, trees.parents):
            self._table.publish([part.rows.sequence for part in parts], ready)
        for part, num_computed in zip(parts, ready["num_computed"].tolist(), strict=True):
            rows, sequence = part.rows, part.rows.sequence
            next_token, path = outcomes.get(sequence.seq_id, (-1, _NO_TOKENS))
            outcome.verdicts.append(
                Verdict(
                    seq_id=sequence.seq_id,
                    num_computed=num_computed,
                    rows=rows.num_rows,
                    next_token=next_token,
                    path=path,
                    num_cached=sequence.num_cached,
                    num_nodes=len(rows.tree_tokens),
                )
            )
        return outcome

    def _draft(
        self,
        head: HiddenStateDrafter,
        parts: Sequences[_Part],
        outcomes: dict[int, tuple[int, np.ndarray]],
        outcome: _Outcome,
    ) -> None:
        """Let the head read the committed rows and draft after them. If it fails, its drafts are missing; of several
        ranks, which exchange what it computes, all fail."""
        seen = [part for part in parts if part.item.head_nodes >= 0]
        if not seen:
            return
        started = self._clock.mark()
        try:
            asked = [_head_rows(part, outcomes.get(part.rows.sequence.seq_id)) for part in seen]
            for part, rows, tree in zip(seen, asked, head.propose(asked), strict=True):
                if rows.max_nodes > 0:
                    outcome.drafted_seq_ids.append(part.rows.sequence.seq_id)
                    outcome.drafts.append(tree)
        except Exception:
            if self._num_ranks > 1:
                raise
            if not self._eagle_head_has_failed:
                self._eagle_head_has_failed = True
                logger.warning("the EAGLE head failed; rounds go on without its drafts", exc_info=True)
        outcome.head_s = self._clock.seconds_since(started)

    def _draws(self, emitting: Sequences[_Part], trees: Trees, num_successors: int) -> Draws | None:
        """None where nothing is drawn. trees: of all parts; those that do not emit have no nodes."""
        # Every rank's head needs the round's tokens.
        if not emitting or not (self._rank == 0 or self._rounds.draw_on_all_ranks or self.has_head):
            return None
        if len(emitting) < len(trees.offsets) - 1:
            trees = trees_of([part.rows for part in emitting])
        keeps_logits = any(map(_is_rejection, emitting))
        sampling = _row_sampling(emitting, trees, self._rounds.rows_for)
        return Draws(trees, sampling, num_successors, keeps_logits)

    def _outcomes(
        self, emitting: Sequences[_Part], draws: Draws, emitted: Emitted
    ) -> dict[int, tuple[int, np.ndarray]]:
        """Next token and accepted path by sequence."""
        outcomes = {}
        offsets = draws.trees.offsets
        for index, (part, next_token, path) in enumerate(
            zip(emitting, emitted.next_tokens, emitted.paths, strict=True)
        ):
            sequence = part.rows.sequence
            outcomes[sequence.seq_id] = (next_token, path)
            if emitted.logits is not None and _is_rejection(part):
                rows = slice(offsets[index] + index, offsets[index + 1] + index + 1)
                outcomes[sequence.seq_id] = self._accept_by_rejection(part, emitted.logits[rows])
        return outcomes

    def _accept_by_rejection(self, part: _Part, logits: torch.Tensor) -> tuple[int, np.ndarray]:
        assert part.item.tree.probs is not None
        tokens = part.rows.tree_tokens
        probs = part.item.tree.probs.first(len(tokens))
        sampling = _row_sampling([part], trees_of([part.rows]), rows_for)
        accepted, next_tokens = verify_rejections(logits, sampling, [tokens], [probs])
        return int(next_tokens[0]), np.arange(accepted[0], dtype=np.int32)

    answer = verify  # the name that every worker's engine has

    def clear(self) -> None:
        """Forget every sequence; their next deltas are answered stale. Raises torch's error when the device has failed
        for good."""
        check_device(self._runner.device)
        self._table.clear()


def _parts_of(
    items: Sequences[VerifyItem], sequences: Sequences[Sequence | None], trees: Sequences[DraftTree], taken: np.ndarray
) -> list[_Part]:
    """Those that are ready. A tree before the last token is computed is left out. One without enough room is cut to its
    first nodes: under rejection the choice must not depend on the tokens."""
    parts = []
    first_row = 0
    fields = (taken[name].tolist() for name in ("status", "count", "is_last", "num_nodes"))
    for item, sequence, tree, status, count, is_last, num_nodes in zip(items, sequences, trees, *fields, strict=True):
        if status != READY:
            continue
        assert sequence is not None
        kept = tree.first(num_nodes)
        rows = SequenceRows(sequence, count, kept.token_ids, kept.parents)
        parts.append(_Part(item, rows, first_row, bool(is_last)))
        first_row += count + num_nodes
    return parts


def _rounds_of(runner: ModelRunner | EncoderDecoderRunner, vocab_size: int) -> HostRounds | DeviceRounds:
    if isinstance(runner, ModelRunner) and runner.has_device_inputs:
        return DeviceRounds(runner, vocab_size)
    return HostRounds(runner)


def _head_rows(part: _Part, emitted: tuple[int, np.ndarray] | None) -> HeadRows:
    """The part's committed tokens of this round and the accepted nodes, each with the token that follows it.

    emitted: next token and accepted path, None for a sequence that has tokens left to compute.
    """
    sequence, count = part.rows.sequence, part.rows.count
    begin = sequence.num_computed
    following = sequence.tokens[begin + 1 : begin + count + 1].astype(np.int64)
    feature_rows = np.arange(part.first_row, part.first_row + count)
    if emitted is not None:
        next_token, path = emitted
        following = np.concatenate([following, part.rows.tree_tokens[path], [next_token]]).astype(np.int64)
        feature_rows = np.concatenate([feature_rows, part.first_row + count + path])
    return HeadRows(
        begin=begin,
        token_ids=following,
        feature_rows=feature_rows,
        slots=sequence.slots(0, begin + len(following)),
        max_nodes=part.item.head_nodes if part.emits else 0,
    )


def _is_rejection(part: _Part) -> bool:
    """Whether the part's draft is accepted by the rejection rule."""
    rows = part.rows
    return rows.sequence.draws_from_probs and part.item.tree.probs is not None and len(rows.tree_tokens) > 0


def _fits_chain(probs: TopProbs, tree: DraftTree) -> bool:
    """Whether the tree is a chain with a draft distribution for each node, as the rejection rule needs."""
    count = len(tree) * probs.k
    is_chain = bool((tree.parents == np.arange(-1, len(tree) - 1)).all())
    return probs.k >= 1 and len(probs.token_ids) == len(probs.probs) == count and is_chain


def _slots(rows: SequenceRows) -> np.ndarray:
    """Slots of the rows' keys and values, int64."""
    begin = rows.sequence.num_computed
    return rows.sequence.slots(begin, begin + rows.num_rows)


def _row_sampling(parts: Sequences[_Part], trees: Trees, rows_for: Callable[..., RowSampling]) -> RowSampling:
    """Sampling of each logit row: a root row gives the token at index `length`, a node of depth d that at
    `length` + d."""
    samplings = [part.rows.sequence.sampling for part in parts]
    lengths = np.array([part.rows.sequence.length for part in parts])
    row_sequence, positions = logit_places(trees.parents, trees.offsets, lengths)
    paths = None
    if any(sampling.uses_history for sampling in samplings):
        paths = Paths(*tree_paths(*trees))
    return rows_for(samplings, row_sequence, positions, paths)
