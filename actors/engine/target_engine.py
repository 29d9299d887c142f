"""The target engine: one forward over the committed tokens and draft trees of a `VerifyBatch`, then acceptance."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from functools import partial

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from actors.draft_tree import DraftTree, TopProbs
from actors.engine.ahead_check import is_well_formed
from actors.engine.batch import SequenceRows
from actors.engine.begun_round import BegunRound, outcomes_of, verdicts_of
from actors.engine.block_pool import BlockPool
from actors.engine.device_rounds import DeviceRounds
from actors.engine.draft_trees import Trees, joined, valid_trees
from actors.engine.draws import Draws
from actors.engine.encoder_decoder_runner import EncoderDecoderRunner
from actors.engine.hidden_state_drafter import HeadRows, HiddenStateDrafter
from actors.engine.host_rounds import HostRounds
from actors.engine.kv_cache import check_device
from actors.engine.logprobs import prompt_logprobs, scored_prompts, token_logprobs, wants_logprobs
from actors.engine.model_runner import ModelRunner
from actors.engine.options import EngineOptions
from actors.engine.planned_round import PlannedRound, planned
from actors.engine.prepared_round import PreparedRound, next_round, prepare
from actors.engine.rejections import rejecting_places, with_rejections
from actors.engine.round_clock import RoundClock, seconds_between
from actors.engine.round_items import STALE, STARVED, record_forward
from actors.engine.runner import make_runner
from actors.engine.sequence_table import SequenceTable, TakenIn, distinct
from actors.messages import MasksSource, VerifyAhead, VerifyBatch, VerifyItem, VerifyResult
from actors.sampling.row_masks import RowMasks, row_masks

logger = logging.getLogger(__name__)

_NO_DRAFT = DraftTree.empty()
_MOST_RECORDED_DRAFTS = 32


class _Part(msgspec.Struct, frozen=True, gc=False):
    """One sequence of the round and the place of its rows."""

    item: VerifyItem
    rows: SequenceRows
    first_row: int
    emits: bool


class TargetEngine:
    """Sequences, their KV blocks and the model. One call of `verify` is one round.

    With tensor parallelism every rank runs the same batches in the same order, and rank 0 broadcasts the sampled
    tokens. The other ranks learn which draft nodes were accepted from the next round's tokens, if not from their own
    samples.
    """

    def __init__(self, model: PreTrainedModel, options: EngineOptions, rank: int = 0, num_ranks: int = 1) -> None:
        self.options = options
        self.model = model
        self.vocab_size = int(model.get_output_embeddings().out_features)
        self._runner = make_runner(
            model, options.num_slots, options.exact, attention=options.attention, is_eager=options.is_eager
        )
        max_states = options.max_cached_states if self.chain_only else 0
        shares_prefixes = self._runner.sequence_type.shares_prefixes and (max_states > 0 or not self.chain_only)
        has_prefix_cache = options.prefix_cache and shares_prefixes
        self.pool = BlockPool(options.num_blocks, options.block_size, has_prefix_cache, max_cached_states=max_states)
        self._rounds = _rounds_of(self._runner, self.vocab_size)
        self._scoring_rounds = HostRounds(self._runner)
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
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def row_steps(self) -> list[int]:
        """Row counts that forwards of decoding rounds are padded to, ascending; empty: no padding."""
        return list(self._runner.row_steps)

    @property
    def records_launches(self) -> bool:
        return isinstance(self._runner, ModelRunner) and self._runner.records_launches

    @property
    def has_head(self) -> bool:
        return self.eagle_head is not None

    @property
    def num_sequences(self) -> int:
        return len(self._table)

    @property
    def chain_only(self) -> bool:
        """Whether draft trees must be chains, because the target has a recurrent state. Others are not verified."""
        return self._runner.chain_only

    def verify(self, batch: VerifyBatch, masks: MasksSource | None = None) -> VerifyResult:
        """Run one round. Unknown sequences and those of another length are returned in `stale_seq_ids`. masks: as for
        `begin`."""
        begun = self.begin(batch, masks)
        self.settle(begun)
        return self.result(begun)

    def begin(self, batch: VerifyBatch, masks: MasksSource | None = None) -> BegunRound:
        """Take in the deltas of a round and launch it. Every round that has begun must be settled before the next.

        masks: called when the rows are launched, if tokens are drawn from them. Raises what it raises, and ValueError
        if masks follow the batch and there is no `masks`, or if they do not fit it.
        """
        if batch.masks_follow and masks is None:
            raise ValueError(f"round {batch.round_id}: masks_follow is True, and there is nothing that gives the masks")
        started = self._clock.mark()
        for seq_id in batch.finished:
            self._table.forget(seq_id)
        items = distinct(batch.items)
        begun = BegunRound(batch.round_id, started, batch.finished, [item.delta.seq_id for item in items], items)
        if items:
            num_nodes, trees = self._usable_trees(items)
            of_rows = partial(_masks_of, batch, masks) if batch.masks_follow and masks is not None else None
            self._launch(begun, self._table.take_in(items, num_nodes), trees, batch.num_successors, of_rows)
        return begun

    def prepare(self, ahead: VerifyAhead, begun: BegunRound) -> PreparedRound | None:
        """Make ready a round that was sent ahead, while the device computes the round before it. None: it does not
        follow that round, or is none that a router sends."""
        if begun.round is None or ahead.after != begun.round_id or begun.rejecting:
            return None
        return prepare(ahead, begun.round) if is_well_formed(ahead, self.vocab_size) else None

    def follow(self, prepared: PreparedRound, settled: BegunRound) -> BegunRound | None:
        """Launch a prepared round after the outcome of the round before it; None: it is declined. The same as `begin`
        with the batch that `actors.round_ahead.pick` makes."""
        started = self._clock.mark()
        assert settled.emitted is not None
        ahead, asked = prepared.ahead, next_round(prepared, settled.emitted)
        if asked is None:
            return None
        for seq_id in ahead.finished:
            self._table.forget(seq_id)
        seq_ids = [sequence.seq_id for sequence in prepared.sequences]
        begun = BegunRound(ahead.round_id, started, ahead.finished, seq_ids, [])
        sequences = [self._table.get(seq_id) for seq_id in begun.seq_ids]
        if sequences != prepared.sequences:  # some were dropped meanwhile
            asked.items["sequence"] = [0 if sequence is None else sequence.address for sequence in sequences]
        taken = self._table.apply(begun.seq_ids, sequences, asked.items, asked.tokens)
        self._launch(begun, taken, asked.trees, ahead.num_successors)
        return begun

    @property
    def overlaps(self) -> bool:
        """Whether the host has time while a round is computed, and rounds that are sent ahead are prepared in it."""
        is_alone = self._num_ranks == 1 and not self.has_head
        return self._clock.is_of_device and is_alone and not self.chain_only

    def is_computing(self, begun: BegunRound) -> bool:
        """Whether the device has still to do some of a round's launches."""
        return not (isinstance(begun.launched, float) or begun.launched.query())

    def _launch(
        self,
        begun: BegunRound,
        taken: TakenIn,
        trees: Trees,
        num_successors: int,
        masks: Callable[[PlannedRound, int], RowMasks | None] | None = None,
    ) -> None:
        """trees: of all sequences of `taken`. masks: gives the masks of a round in a vocabulary of a size."""
        if taken.num_ready < len(begun.seq_ids):
            begun.statuses = taken.items["status"].tolist()
        if not taken.num_ready:
            return
        round = begun.round = planned(taken, trees)
        if self.eagle_head is not None:
            self.eagle_head.computed(np.concatenate([_slots(rows) for rows in round.parts()]))
            if any(item.head_nodes >= 0 for item in begun.ready):
                self.eagle_head.tap.open()
        if begun.asked and True in [sequence.is_rejection for sequence in round.sequences]:
            begun.rejecting = rejecting_places(round, begun.ready)
        draws = None
        # Every rank's head needs the round's tokens.
        if (self._rank == 0 or self._rounds.draw_on_all_ranks or self.has_head) and round.num_emitting:
            of_rows = None if masks is None else partial(masks, round, self.vocab_size)
            draws = Draws(num_successors, bool(begun.rejecting), of_rows, keeps_raw=wants_logprobs(round))
        scored = scored_prompts(round) if isinstance(self._runner, ModelRunner) else []
        if scored:
            begun.is_scoring = True
            begun.computing, logits = self._scoring_rounds.begin_scoring(round, draws, scored)
            begun.prompt_logprobs = prompt_logprobs(logits, scored)
        else:
            begun.computing = self._rounds.begin(round, draws)
            begun.is_new_shape = isinstance(self._runner, ModelRunner) and self._runner.launched_new
        begun.launched = self._clock.mark()

    def settle(self, begun: BegunRound) -> None:
        """Wait for the outcome of the round that has begun last, and record it."""
        round = begun.round
        if round is not None:
            rounds = self._scoring_rounds if begun.is_scoring else self._rounds
            begun.emitted, begun.computing = rounds.read(begun.computing), None
            if begun.rejecting and begun.emitted is not None:
                begun.emitted = with_rejections(begun.emitted, round, begun.ready, begun.rejecting)
            if begun.emitted is not None and begun.emitted.raw_logits is not None:
                begun.logprobs = token_logprobs(round, begun.emitted)
            if self.eagle_head is not None:
                self._draft(self.eagle_head, begun, round)
            if record_forward(round.items, round.trees.tokens, round.trees.parents):
                self._table.publish(round.sequences, round.items)
        begun.num_free = self.pool.num_free
        begun.ended = self._clock.mark()

    def result(self, begun: BegunRound) -> VerifyResult:
        """Result of a settled round."""
        verdicts = [] if begun.round is None else verdicts_of(begun.round, begun.emitted)
        for place in begun.logprobs.keys() | begun.prompt_logprobs.keys():
            own, of_prompt = begun.logprobs.get(place), begun.prompt_logprobs.get(place)
            verdicts[place] = msgspec.structs.replace(verdicts[place], logprobs=own, prompt_logprobs=of_prompt)
        return VerifyResult(
            round_id=begun.round_id,
            verdicts=verdicts,
            stale_seq_ids=begun.left_out(STALE),
            starved_seq_ids=begun.left_out(STARVED),
            free_blocks=begun.num_free,
            total_blocks=self.pool.num_blocks,
            rows=sum([verdict.rows for verdict in verdicts]),
            elapsed_s=seconds_between(begun.started, begun.ended) - begun.head_s,
            successors=None if begun.emitted is None else begun.emitted.successors,
            drafted_seq_ids=begun.drafted_seq_ids,
            drafts=begun.drafts,
            head_s=begun.head_s,
            is_new_shape=begun.is_new_shape,
            head_is_parallel=self.eagle_head is not None and self.eagle_head.is_parallel,
            head_forwards=begun.head_forwards,
            head_is_new_shape=begun.head_is_new_shape,
        )

    def _usable_trees(self, items: Sequences[VerifyItem]) -> tuple[list[int], Trees]:
        """The number of draft nodes of each item, 0 where its tree cannot be verified; and the trees, joined."""
        drafts = [_NO_DRAFT if item.draft is None else item.draft for item in items]
        are_valid, trees = valid_trees(drafts, self.vocab_size)
        for index, tree in enumerate(drafts):
            if self.chain_only and are_valid[index]:
                are_valid[index] = tree.is_chain
            if tree.probs is not None and are_valid[index]:
                begin = self._table.begin_of(items[index])
                is_rejection = begin is not None and begin.sampling.acceptance == "rejection"
                are_valid[index] = not is_rejection or _fits_chain(tree.probs, tree)
        if trees is None or not all(are_valid):
            drafts = [tree if is_valid else _NO_DRAFT for tree, is_valid in zip(drafts, are_valid, strict=True)]
            trees = joined([tree.token_ids for tree in drafts], [tree.parents for tree in drafts])
        return [len(tree.token_ids) for tree in drafts], trees

    @torch.inference_mode()
    def _draft(self, head: HiddenStateDrafter, begun: BegunRound, round: PlannedRound) -> None:
        """Let the head read the committed rows and draft after them. If it fails, its drafts are missing; of several
        ranks, which exchange what it computes, all fail."""
        parts = _parts_of(round, begun.ready)
        next_tokens, paths = outcomes_of(round, begun.emitted)
        seen = [place for place, part in enumerate(parts) if part.item.head_nodes >= 0]
        if not seen:
            return
        started = self._clock.mark()
        try:
            asked = [
                _head_rows(parts[place], (next_tokens[place], paths[place]) if next_tokens[place] >= 0 else None)
                for place in seen
            ]
            for place, rows, tree in zip(seen, asked, head.propose(asked), strict=True):
                if rows.max_nodes > 0:
                    begun.drafted_seq_ids.append(parts[place].rows.sequence.seq_id)
                    begun.drafts.append(tree)
            begun.head_forwards, begun.head_is_new_shape = head.num_forwards, head.launched_new
        except Exception:
            if self._num_ranks > 1:
                raise
            head.tap.drop()
            if not self._eagle_head_has_failed:
                self._eagle_head_has_failed = True
                logger.warning("the draft head failed; rounds go on without its drafts", exc_info=True)
        begun.head_s = self._clock.seconds_since(started)

    answer = verify  # the name that every worker's engine has

    def clear(self) -> None:
        """Forget every sequence, whose next deltas are answered stale, and the prefix cache. To be called after a
        failed round. Raises torch's error when the device has failed for good."""
        check_device(self._runner.device)
        self._table.clear()
        if self.eagle_head is not None:
            self.eagle_head.tap.drop()


def _parts_of(round: PlannedRound, items: Sequences[VerifyItem]) -> list[_Part]:
    """items: of the ready sequences."""
    parts = []
    first_row = 0
    for item, rows, is_last in zip(items, round.parts(), round.items["is_last"].tolist(), strict=True):
        parts.append(_Part(item, rows, first_row, bool(is_last)))
        first_row += rows.num_rows
    return parts


def _masks_of(batch: VerifyBatch, masks: MasksSource, round: PlannedRound, vocab_size: int) -> RowMasks | None:
    """Masks of the rows that tokens are drawn from. Raises ValueError for masks that do not fit them."""
    of_items = zip(batch.items, masks().masks, strict=True)
    of_sequence = {item.delta.seq_id: own for item, own in of_items}
    emitting = round.emitting
    own = [of_sequence[round.sequences[place].seq_id] for place in emitting.tolist()]
    return row_masks(own, (1 + round.items["num_nodes"][emitting]).tolist(), vocab_size)


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
        min_confidence=part.item.head_min_confidence,
        worth=part.item.head_worth,
        levels=part.item.head_levels,
    )


def _fits_chain(probs: TopProbs, tree: DraftTree) -> bool:
    """Whether the tree is a chain with a draft distribution for each node, as the rejection rule needs."""
    count = len(tree) * probs.k
    return probs.k >= 1 and len(probs.token_ids) == len(probs.probs) == count and tree.is_chain


def _slots(rows: SequenceRows) -> np.ndarray:
    """Slots of the rows' keys and values, int64."""
    begin = rows.sequence.num_computed
    return rows.sequence.slots(begin, begin + rows.num_rows)
