"""The engine of a draft model: guesses a chain or a tree for each sequence, for the drafters `draft_model` and
`ouroboros`.

It draws with the target's own noise, `argmax(process(q) + G)` (coupled sampling), so no probabilities are sent. With
`acceptance: rejection` it draws from its truncated distribution instead and sends that along (Leviathan et al. 2023).
Constrained sequences draw within their grammars, as the target does (`answer_grammars.py`). Siblings are the next best
tokens of `process(q) + G`, which the target draws if its logits differ a little. Trees grow best first, as in EAGLE-2
(Li et al. 2024).

After a draft has been sent, `work_ahead` drafts for its likely outcomes (`draft_ahead.py`), one forward at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from actors.draft_model.answer_grammars import AnswerGrammars
from actors.draft_model.draft_ahead import DraftAhead, TreeShape
from actors.draft_model.guesser import Guesser, Want
from actors.draft_model.known_guesses import Growth, KnownGuesses, Path
from actors.draft_model.ouroboros_drafter import OuroborosDraft, OuroborosDrafter
from actors.draft_model.rank_forwards import LeadingRunner
from actors.draft_tree import DraftTree, TopProbs
from actors.draft_worth import pays
from actors.engine.block_pool import BlockPool
from actors.engine.encoder_decoder_runner import EncoderDecoderRunner
from actors.engine.kv_cache import check_device
from actors.engine.model_runner import ModelRunner
from actors.engine.options import EngineOptions
from actors.engine.rank_group import Leader
from actors.engine.runner import make_runner
from actors.engine.sequence import Sequence
from actors.engine.sequence_table import SequenceTable, distinct
from actors.errors import EngineBroken, ModelError
from actors.grammar.grammars import Grammars
from actors.messages import DraftBatch, DraftItem, DraftResult, SequenceStart
from actors.models.loader import length_limits
from actors.options import LookaheadOptions

logger = logging.getLogger(__name__)

_MAX_NODES = 256  # limit of one tree, as in the configuration
_MAX_PREFILL_ROWS = 512  # rows of a forward of prompts; longer prompts take several
_MAX_AHEAD_ROWS = 64  # rows of a forward ahead, which an arriving request must wait for
_NO_TREE = TreeShape(0, 0, 1)
_MAX_AHEAD_NODES = 512  # limit of one sequence's draft nodes for drafting ahead


@dataclass(slots=True)
class _Draft:
    """A draft in progress."""

    sequence: Sequence
    shape: TreeShape
    growth: Growth
    num_forwards: int = 0

    @property
    def max_nodes(self) -> int:
        return self.shape.max_nodes

    @property
    def is_ready(self) -> bool:
        return self.num_forwards == 0 and len(self.growth.tree) > 0

    @property
    def must_grow(self) -> bool:
        """Whether it is made as deep as asked. Under rejection its time must not depend on its tokens."""
        return len(self.growth.tree) == 0 or self.sequence.is_rejection


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A sequence that is drafted ahead for."""

    sequence: Sequence
    known: KnownGuesses
    plan: DraftAhead


class DraftEngine:
    """Sequences, their KV blocks and the draft model. One call of `draft` answers one `DraftBatch`."""

    def __init__(
        self,
        model: PreTrainedModel,
        options: EngineOptions,
        vocab_map: torch.Tensor | None = None,
        lookahead: LookaheadOptions | None = None,
        ahead: int = 0,
        mask_token: int | None = None,
        most_guesses: int | None = None,
        grammars: Grammars | None = None,
        leader: Leader | None = None,
    ) -> None:
        """vocab_map int64 [outputs]: target token id of each column of the model's logits; None: the same ids.
        ahead: outcomes of each draft that `work_ahead` drafts for; ignored for encoder-decoder models. mask_token: the
        mask token of a parallel model, which must have no encoder; the token is never guessed. most_guesses: tokens
        that a parallel model guesses in a forward; None: as many as requested. grammars: for the target's vocabulary;
        the grammars of sequences are ignored if it is None or the model has more outputs. leader: leads the ranks that
        share a model without an encoder; None: there is one rank. Raises ModelError for a model with a recurrent
        state."""
        self.pool = BlockPool(options.num_blocks, options.block_size, options.prefix_cache)
        self._runner = _runner_of(model, options, leader)
        if self._runner.chain_only:
            raise ModelError(
                f"{model.config.model_type} has a recurrent state; a draft model, which drafts trees, must have none"
            )
        is_masked = grammars is not None and _num_guessed(model, vocab_map) <= grammars.vocab_size
        answers = AnswerGrammars(grammars) if grammars is not None and is_masked else None
        self._guesser = Guesser(self._runner, vocab_map, mask_token, answers)
        self._is_parallel = mask_token is not None
        self._max_depth = most_guesses or _MAX_NODES
        self._table = SequenceTable(self.pool, self._runner.kv, self._runner.sequence_type)
        self._max_len, self._max_side_len = length_limits(model.config)
        self._num_ids = int(model.get_input_embeddings().num_embeddings)
        self._unfit: set[int] = set()  # sequences with tokens or positions that the model lacks
        self._ouroboros: OuroborosDrafter | None = None
        self._max_outcomes = 0  # an encoder-decoder model would compute the whole tree in each forward
        if isinstance(self._runner, ModelRunner):
            self._ouroboros = OuroborosDrafter(self._runner, lookahead or LookaheadOptions(), self._max_len, vocab_map)
            self._max_outcomes = ahead
        self._known: WeakKeyDictionary[Sequence, KnownGuesses] = WeakKeyDictionary()
        self._ahead: dict[int, _Ahead] = {}  # by sequence id

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def records_launches(self) -> bool:
        """Whether launches are recorded, so that the first ones of a shape take longer than the others."""
        return isinstance(self._runner, ModelRunner) and self._runner.records_launches

    @torch.inference_mode()
    def draft(self, batch: DraftBatch) -> DraftResult:
        """One tree for each item, in order. It is empty if there is no room for the sequence, or if it has tokens or
        positions that the model lacks."""
        started = time.perf_counter()
        self._guesser.launched_new = False
        self._forget_namespaces(batch)
        for seq_id in batch.finished:
            self._table.forget(seq_id)
            self._unfit.discard(seq_id)
            self._ahead.pop(seq_id, None)
        items = distinct(batch.items)
        self._make_room(items)
        stale: list[int] = []
        unfit: list[int] = []
        drafts: list[_Draft | OuroborosDraft] = []
        hoped: set[int] = set()  # sequences that were drafted ahead for
        for item in items:
            seq_id = item.delta.seq_id
            self._ahead.pop(seq_id, None)
            if not self._fits(item):
                unfit.append(seq_id)
                continue
            sequence = self._table.find(item.delta, item.begin)
            if sequence is None:
                stale.append(seq_id)
                continue
            known = self._known.pop(sequence, None)
            if self._take_in(sequence, item, known):
                if known is not None and known.is_ahead and item.max_nodes:
                    hoped.add(seq_id)
                drafts.append(self._start(sequence, item, batch.worth))
            else:
                # Forgotten, so that the next delta is answered stale and the sequence is sent again.
                self._table.forget(seq_id)
        self._prefill(drafts)
        trees = self._propose(drafts, batch.worth)
        for draft in drafts:
            draft.sequence.publish()
        return DraftResult(
            round_id=batch.round_id,
            seq_ids=[*(draft.sequence.seq_id for draft in drafts), *unfit],
            trees=[*trees, *(DraftTree.empty() for _ in unfit)],
            stale_seq_ids=stale,
            elapsed_s=time.perf_counter() - started,
            num_ahead=len(hoped),
            num_ready=sum(draft.sequence.seq_id in hoped and draft.is_ready for draft in drafts),
            is_parallel=self._is_parallel,
            num_forwards=_num_forwards(drafts),
            is_new_shape=self._guesser.launched_new,
        )

    def _forget_namespaces(self, batch: DraftBatch) -> None:
        """Phrases outlive their sequences. Guesses do not."""
        if self._ouroboros is None:
            return
        if batch.drops_all:
            self._ouroboros.drop_all_namespaces()
        for namespace in batch.dropped:
            self._ouroboros.drop_namespace(namespace)

    def _fits(self, item: DraftItem) -> bool:
        """Whether the model has the sequence's tokens and positions. Others would fail the whole forward. They are
        answered, not stale: otherwise they would be sent whole every other round."""
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
        """Limit of a sequence's tokens by the model's positions."""
        if self._max_side_len is None:
            return self._max_len
        # The decoder's first position is that of the token before the output.
        return begin.num_prompt_tokens + self._max_side_len - 1 if begin.num_prompt_tokens <= self._max_side_len else 0

    def _take_in(self, sequence: Sequence, item: DraftItem, known: KnownGuesses | None) -> bool:
        """Apply the delta. Returns False and changes nothing if there is no room."""
        delta = item.delta
        if known is not None and isinstance(self._runner, ModelRunner) and _is_followed(sequence, item, known.width):
            nodes = known.follow(tuple(delta.token_ids.tolist()))
            if nodes is not None:
                sequence.follow(delta.token_ids, *nodes, self._runner.kv)
                sequence.publish()
                self._known[sequence] = known
                return True
        return self._table.bring_up_to_date(sequence, delta, sequence.length + len(delta.token_ids))

    def _start(self, sequence: Sequence, item: DraftItem, worth: np.ndarray) -> _Draft | OuroborosDraft:
        shape = self._shape_of(item)
        if item.method == "tree" or self._ouroboros is None:
            # The last guesses of a tree are not computed.
            room = self._most_tokens(sequence.begin) - sequence.length + 1
            return self._start_tree(sequence, shape._replace(max_depth=min(shape.max_depth, room)))
        self._ouroboros.observe_tokens(sequence, len(item.delta.token_ids), self._readable(item.corrections))
        runs = self._readable(item.runs)
        return self._ouroboros.start(sequence, shape.max_nodes, shape.max_depth, runs, item.min_confidence, worth)

    def _readable(self, runs: np.ndarray) -> list[list[int]]:
        """The runs, separated by -1, whose tokens the model has."""
        if runs.dtype.kind != "i":
            return []
        found: list[list[int]] = [[]]
        for token in runs.tolist():
            if token < 0:
                found.append([])
            else:
                found[-1].append(token)
        return [run for run in found if run and max(run) < self._num_ids]

    def _start_tree(self, sequence: Sequence, shape: TreeShape) -> _Draft:
        # The rejection rule judges one token drawn from q at each position, so the draft is a chain.
        branch = 1 if sequence.is_rejection else shape.branch
        known = self._known.pop(sequence, None) or KnownGuesses(branch + self._max_outcomes)
        most_new = shape.most_computed(branch)
        if shape.max_nodes and sequence.reserve(sequence.length + len(known.nodes) + most_new):
            known.num_reserved = most_new
            known.is_ahead = False
            self._known[sequence] = known
            shape = shape._replace(branch=branch)
            return _Draft(sequence, shape, Growth(shape.tree(shape.max_depth), known))
        return _Draft(sequence, _NO_TREE, Growth(_NO_TREE.tree(0), KnownGuesses(1)))

    @torch.inference_mode()
    def work_ahead(self) -> bool:
        """Make one forward for the likely outcomes of the drafts sent, the likeliest of all sequences first.

        Returns False when nothing is left to do until the next batch. A failure is logged, and costs what has been
        drafted ahead. Raises EngineBroken where the ranks of the model can go on no more.
        """
        if not self._ahead:
            return False
        try:
            wants = self._next_ahead()
            if wants:
                self._guesser.guess(wants)
        except EngineBroken:
            raise
        except Exception:
            logger.exception("drafting ahead failed")
            self._give_up_ahead()
        return bool(self._ahead)

    def _next_ahead(self) -> list[Want]:
        wanted = []
        for seq_id, ahead in list(self._ahead.items()):
            next_wanted = ahead.plan.wanted() if self._table.get(seq_id) is ahead.sequence else []
            if next_wanted:
                wanted += [(seq_id, part) for part in next_wanted]
            else:
                del self._ahead[seq_id]
        wants: dict[int, Want] = {}
        num_rows = 0
        for seq_id, part in sorted(wanted, key=lambda item: -item[1].chance):
            ahead = self._ahead[seq_id]
            want = self._want(ahead.sequence, ahead.known, list(part.paths), ahead.plan.shape)
            if num_rows and num_rows + want.num_rows > _MAX_AHEAD_ROWS:
                break
            num_rows += want.num_rows
            if seq_id in wants:
                wants[seq_id].paths.extend(part.paths)
            else:
                wants[seq_id] = want
        for seq_id, want in list(wants.items()):
            if not self._has_room_ahead(want):
                del wants[seq_id], self._ahead[seq_id]
        return list(wants.values())

    def _has_room_ahead(self, want: Want) -> bool:
        """Reserve blocks for the paths, if enough stay free."""
        num_nodes = len(want.known.nodes) + want.num_rows
        needed = self._blocks_for(want.sequence, num_nodes)
        return (
            num_nodes <= _MAX_AHEAD_NODES
            and needed <= self.pool.num_free // 2
            and want.sequence.reserve(want.sequence.length + num_nodes)
        )

    def _blocks_for(self, sequence: Sequence | None, more: int) -> int:
        """Blocks that a sequence (None: a new one) lacks for `more` slots after its text."""
        if sequence is None:
            return -(-more // self.pool.block_size)
        return max(0, -(-(sequence.length + more) // self.pool.block_size) - sequence.num_blocks)

    def _make_room(self, items: Sequences[DraftItem]) -> None:
        """Give up everything that was drafted ahead if the blocks might not suffice for these items."""
        if not self._known:
            return
        needed = 0
        for item in items:
            sequence = self._table.get(item.delta.seq_id) if item.delta.start else None
            known = None if sequence is None else self._known.get(sequence)
            num_nodes = 0 if known is None else len(known.nodes)
            shape = self._shape_of(item)
            most_new = shape.most_computed(shape.branch)
            if item.method == "lookahead" and self._ouroboros is not None:
                most_new = max(most_new, shape.max_depth + self._ouroboros.most_nodes)
            needed += self._blocks_for(sequence, num_nodes + len(item.delta.token_ids) + most_new)
        if needed > self.pool.num_free:
            self._give_up_ahead()

    def _give_up_ahead(self) -> None:
        self._ahead.clear()
        for sequence, known in self._known.items():
            sequence.cut_tree(known.num_reserved)
        self._known.clear()

    def _propose(self, drafts: list[_Draft | OuroborosDraft], worth: np.ndarray) -> list[DraftTree]:
        """One tree for each draft, in order. worth: see `DraftBatch`."""
        self._grow([draft for draft in drafts if isinstance(draft, _Draft)], worth)
        by_ouroboros = [draft for draft in drafts if isinstance(draft, OuroborosDraft)]
        found = iter(self._ouroboros.propose(by_ouroboros) if self._ouroboros is not None else [])
        return [self._finished(draft) if isinstance(draft, _Draft) else next(found) for draft in drafts]

    def _finished(self, draft: _Draft) -> DraftTree:
        """The tree to send. Registers its outcomes for drafting ahead."""
        sequence, known = draft.sequence, draft.growth.known
        tree = draft.growth.tree.finished()
        if sequence.is_rejection:
            return _with_probs(tree, known)
        if self._max_outcomes and len(tree):
            room = self._most_tokens(sequence.begin) - sequence.length
            plan = DraftAhead(sent=tree, known=known, shape=draft.shape, room=room, count=self._max_outcomes)
            self._ahead[sequence.seq_id] = _Ahead(sequence, known, plan)
            known.is_ahead = True
        return tree

    def _prefill(self, drafts: list[_Draft | OuroborosDraft]) -> None:
        """Compute committed tokens until one chunk is left, which goes with the first guess. If no guess is wanted,
        only the last token is left, because the next guess needs its logits."""
        for draft in drafts:
            most_left = _MAX_PREFILL_ROWS if draft.max_nodes else 1
            while (pending := draft.sequence.num_pending) > most_left:
                self._guesser.compute(draft.sequence, min(pending - 1, _MAX_PREFILL_ROWS))

    def _grow(self, drafts: list[_Draft], worth: np.ndarray) -> None:
        """One forward for each step of all trees, until one does not pay."""
        while True:
            growing = [(draft, paths) for draft in drafts if (paths := draft.growth.advance())]
            if not growing:
                return
            confidence = [each for draft, _ in growing for each in draft.growth.pending]
            if not any(draft.must_grow for draft, _ in growing) and not pays(worth, confidence):
                return
            for draft, _ in growing:
                draft.num_forwards += 1
            self._guesser.guess(
                [self._want(draft.sequence, draft.growth.known, paths, draft.shape) for draft, paths in growing]
            )

    def _want(self, sequence: Sequence, known: KnownGuesses, paths: list[Path], shape: TreeShape) -> Want:
        if not self._is_parallel:
            return Want(sequence, known, paths)
        room = self._most_tokens(sequence.begin) - sequence.length + 1
        return Want(sequence, known, paths, depth=shape.max_depth, max_depth=room)

    def _shape_of(self, item: DraftItem) -> TreeShape:
        """The requested shape, within the limit of one tree."""
        max_nodes = min(item.max_nodes, _MAX_NODES)
        max_depth = min(item.max_depth or max_nodes, max_nodes, self._max_depth)
        return TreeShape(max_nodes, max_depth, item.branch, item.min_confidence, self._is_parallel)

    answer = draft  # the name that every worker's engine has

    def clear(self) -> None:
        """Forget every sequence, whose next deltas are answered stale, and the prefix cache. To be called after a
        failed round. Raises torch's error when the device has failed for good."""
        check_device(self._runner.device)
        self._table.clear()
        self._unfit.clear()
        self._known.clear()
        self._ahead.clear()


def _num_forwards(drafts: Sequences[_Draft | OuroborosDraft]) -> int:
    """Forwards made for drafts, those of the two kinds one after the other."""
    numbers = [(isinstance(draft, OuroborosDraft), draft.num_forwards) for draft in drafts]
    return sum(max((count for kind, count in numbers if kind == wanted), default=0) for wanted in (False, True))


def _runner_of(
    model: PreTrainedModel, options: EngineOptions, leader: Leader | None
) -> ModelRunner | EncoderDecoderRunner:
    make = make_runner if leader is None else partial(LeadingRunner, leader=leader)
    return make(model, options.num_slots, attention=options.attention, is_eager=options.is_eager)


def _num_guessed(model: PreTrainedModel, vocab_map: torch.Tensor | None) -> int:
    """Token ids below this may be guessed."""
    return int(model.get_output_embeddings().out_features if vocab_map is None else vocab_map.max() + 1)


def _is_followed(sequence: Sequence, item: DraftItem, width: int) -> bool:
    """Whether guesses of this width can answer the item."""
    is_tree = item.method == "tree" and not sequence.is_rejection
    return is_tree and item.max_nodes > 0 and item.branch <= width


def _with_probs(chain: DraftTree, known: KnownGuesses) -> DraftTree:
    path = tuple(chain.token_ids.tolist())
    probs = None
    if path:
        ids, shares = zip(*(known.probs_after(path[:depth]) for depth in range(len(path))), strict=True)
        probs = TopProbs(np.concatenate(ids), np.concatenate(shares), len(ids[0]))
    return msgspec.structs.replace(chain, probs=probs)
