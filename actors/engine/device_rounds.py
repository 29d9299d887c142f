"""Rounds on an accelerator: one copy up, launches that read nothing of the host, one copy down.

With tensor parallelism each rank draws from its share of the vocabulary. Ranks exchange a few words a row, and the
likeliest tokens of their shares if the round asks for them. Two cases need whole rows of logits: logits that are kept,
and, in a second launch, trees whose walk reaches a row whose token the exchanged words do not determine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from actors.engine.arena import Arena, Part, Views, Written
from actors.engine.batch import NODES_OF_A_WORD, num_words
from actors.engine.device_inputs import SAMPLING_PLACE, DeviceInputs, Shape
from actors.engine.draws import Draws, Emitted
from actors.engine.host_copy import HostCopy
from actors.engine.model_runner import ModelRunner
from actors.engine.planned_round import PlannedRound
from actors.engine.round_inputs import Sizes, sampling_addresses, sizes_of, write_round
from actors.engine.row_tiers import context_tier, power_tier, row_tier
from actors.messages import Successors
from actors.models.collectives import gather_ranks
from actors.sampling.adjustment_table import AdjustmentTable
from actors.sampling.device_sampling import draw, draw_packed, walk_trees
from actors.sampling.device_shards import Shard, draw_from_shards, num_leaders
from actors.sampling.device_successors import likeliest_of, merged, summarize
from actors.sampling.packed_rows import sampling_in, slots_of, words_of
from actors.sampling.row_masks import RowMasks, mask_logits
from actors.sampling.rows import RowSampling

_NO_WORDS = np.empty(0, np.int64)
_NOTHING_WRITTEN = Written(0, Views([]), lambda words: None)


class _Shape(NamedTuple):
    """Sizes of a round's draws, with padding."""

    adjusted_rows: int  # rows with penalties or bias
    truncates: bool  # whether a row has top-k, top-p or min-p
    nodes: int  # of a tree
    successors: int
    keeps_logits: bool
    keeps_raw: bool
    is_sharded: bool  # ranks draw from their shares of the vocabulary
    leaders: int  # with is_sharded: scores that each rank sends of a row, see `num_leaders`
    table: int  # generation of the table of adjustments, if it is read


class _Launched(NamedTuple):
    """A round's results on the device, in memory that the next round may reuse."""

    result: torch.Tensor  # int64: walked trees, [trees, 2 + nodes], then successors as of `likeliest_of`, [logits, k]
    drawn: torch.Tensor  # int64 [logits]; negative: not determined
    logits: torch.Tensor | None  # whole if kept; this rank's share if tokens may be missing
    raw: torch.Tensor | None  # whole, before the grammars' masks


class BegunOnDevice(NamedTuple):
    """A round that the device computes."""

    round: PlannedRound
    draws: Draws
    sizes: Sizes
    inputs: DeviceInputs
    shape: _Shape
    launched: _Launched


class DeviceRounds:
    """As `HostRounds`; the tokens are the same. Needs a runner with device inputs."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self.draw_on_all_ranks = runner.vocabulary_shard is not None
        self._table = AdjustmentTable(runner.device)
        self._host_copy = HostCopy(runner.device)
        self._mask_arena = Arena(runner.device)
        self._written = _NO_WORDS  # int64: what was sent last, on the host

    def begin(self, round: PlannedRound, draws: Draws | None) -> BegunOnDevice | None:
        """Launch a round without waiting for it. draws: None if nothing is drawn; then nothing is copied back."""
        sizes = sizes_of(round.items, round.trees)
        # If every row is drawn from, the numbers of rows and sequences determine those of logits and trees.
        may_record = sizes.logits == sizes.rows
        if draws is None:
            undrawn = self._shape_of(round, sizes, is_drawn=False)
            inputs = self._runner.send_round(undrawn, self._writing(round), [], round.pack, most_rows=sizes.most_rows)
            self._runner.launch(inputs, None, lambda: self._compute(inputs), may_record=may_record)
            return None
        self._table.assign(sampling_addresses(round.items) if sizes.adjusted else _NO_WORDS)
        shape_sent = self._shape_of(round, sizes, is_drawn=True)
        inputs = self._send(round, shape_sent, sizes.most_rows)
        shape = self._draws_of(draws, sizes)
        if draws.masks is None:
            launched = self._runner.launch(inputs, shape, lambda: self._launch(inputs, shape), may_record=may_record)
        else:
            # The device computes the rows while the host waits for the masks. Draws within them are not recorded.
            logits = self._runner.launch(inputs, None, lambda: self._runner.compute(inputs), may_record=may_record)
            launched = self._draw(logits, inputs, shape, draws.masks())
        return BegunOnDevice(round, draws, sizes, inputs, shape, launched)

    def read(self, begun: BegunOnDevice | None) -> Emitted | None:
        """Wait for the round that began last, and return its outcome."""
        if begun is None:
            return None
        round, draws, sizes, _, shape, launched = begun
        values = self._host_copy.read(launched.result)
        self._table.confirm()
        num_trees = power_tier(sizes.trees)
        size = num_trees * (2 + shape.nodes)
        nodes, ends, next_tokens, is_told = _outcomes(values, sizes.trees, 2 + shape.nodes)
        if not is_told:
            self._redraw(round, values[:size].reshape(num_trees, -1)[: sizes.trees, 1], begun)
            walked = self._host_copy.read(launched.result[:size])  # over the same values
            nodes, ends, next_tokens, _ = _outcomes(walked, sizes.trees, 2 + shape.nodes)
        return Emitted(
            nodes,
            ends,
            next_tokens,
            successors=_successors(values[size:], sizes.logits, shape.successors),
            logits=launched.logits if draws.keeps_logits else None,
            raw_logits=launched.raw,
        )

    def _shape_of(self, round: PlannedRound, sizes: Sizes, *, is_drawn: bool) -> Shape:
        # All ranks of a group compute the same number of rows of logits, whether they draw or not.
        num_logits = row_tier(sizes.logits)
        return Shape(
            rows=row_tier(sizes.rows),
            sequences=power_tier(len(round.items)),
            words=sizes.words,
            max_context=context_tier(sizes.max_context),
            block_size=round.sequences[0].block_size,
            logits=num_logits,
            trees=power_tier(sizes.trees) if is_drawn else 0,
            sampling=words_of(num_logits, sizes.own_adjustments) if is_drawn else 0,
        )

    def _writing(self, round: PlannedRound) -> Callable[[np.ndarray, np.ndarray, Shape], None]:
        padding_slot = self._runner.kv.padding_slot

        def write(words: np.ndarray, places: np.ndarray, shape: Shape) -> None:
            if shape.trees:
                self._written = words[places[SAMPLING_PLACE] :]
            write_round(round.items, round.trees, padding_slot, words, places, shape)

        return write

    def _send(self, round: PlannedRound, shape: Shape, most_rows: int) -> DeviceInputs:
        """As `ModelRunner.send_round`; brings the table of adjustments up to date."""
        updates = [Part(array, array.shape) for array in self._table.updates if len(array)]
        writing = self._writing(round)
        inputs = self._runner.send_round(shape, writing, updates, round.pack, most_rows=most_rows)
        if updates:
            self._table.write(*inputs.updates)
        return inputs

    def _sampling(self, sizes: Sizes) -> RowSampling:
        """Sampling parameters that were sent last, of all rows of logits."""
        return sampling_in(self._written, sizes.logits, row_tier(sizes.logits), sizes.own_adjustments)

    @torch.inference_mode()
    def _redraw(self, round: PlannedRound, next_tokens: np.ndarray, begun: BegunOnDevice) -> None:
        """Draw the missing tokens from whole rows, and walk the trees again. All ranks call this together.

        next_tokens: int64 [T], negative for a tree whose walk came to a missing token.
        """
        shard, launched = self._runner.vocabulary_shard, begun.launched
        assert shard is not None
        assert launched.logits is not None
        offsets = round.emitting_trees.offsets
        trees = np.flatnonzero(next_tokens < 0)
        rows = np.concatenate([np.arange(offsets[tree] + tree, offsets[tree + 1] + tree + 1) for tree in trees])
        rows = rows[launched.drawn.cpu().numpy()[rows] < 0]
        places = torch.from_numpy(rows).to(launched.drawn.device)
        whole = shard.gather(launched.logits[places])
        sampling = self._sampling(begun.sizes).take(rows)
        launched.drawn[places] = draw(whole, sampling, table=self._table.tensor).tokens
        _walk(launched.drawn, begun.inputs, begun.shape, launched.result)

    def _draws_of(self, draws: Draws, sizes: Sizes) -> _Shape:
        is_sharded = self._runner.vocabulary_shard is not None and not (draws.keeps_logits or draws.keeps_raw)
        return _Shape(
            adjusted_rows=slots_of(row_tier(sizes.logits), sizes.adjusted),
            truncates=sizes.truncates,
            nodes=NODES_OF_A_WORD * num_words(sizes.largest_tree),
            successors=min(draws.num_successors, self._vocab_size),
            keeps_logits=draws.keeps_logits,
            keeps_raw=draws.keeps_raw,
            is_sharded=is_sharded,
            leaders=num_leaders(self._sampling(sizes)) if is_sharded else 0,
            table=self._table.generation if sizes.adjusted else 0,
        )

    def _compute(self, inputs: DeviceInputs) -> None:
        """Fill the KV slots of rows that nothing is drawn from."""
        self._runner.compute(inputs)

    def _launch(self, inputs: DeviceInputs, shape: _Shape) -> _Launched:
        return self._draw(self._runner.compute(inputs), inputs, shape, None)

    @torch.inference_mode()
    def _draw(self, logits: torch.Tensor, inputs: DeviceInputs, shape: _Shape, masks: RowMasks | None) -> _Launched:
        packed, _, _, offsets = inputs.more
        size = (len(offsets) - 1) * (2 + shape.nodes)
        result = logits.new_empty(size + len(logits) * shape.successors, dtype=torch.int64)
        if shape.successors:
            likeliest_of(self._summaries(logits, shape.successors), result[size:].view(len(logits), -1))
        shard = self._runner.vocabulary_shard
        raw = None
        if shape.keeps_raw:
            raw = shard.gather(logits) if shard is not None else logits if masks is None else logits.clone()
        if masks is not None:
            words, rows = self._mask_arena.send(_NOTHING_WRITTEN, _mask_parts(masks, len(logits)), tuple)
            mask_logits(logits, words, rows, first_id=0 if shard is None else shard.first_id)
        keeps_logits = shape.keeps_logits
        if shard is not None and shape.is_sharded:
            own = Shard(logits, packed, shard.first_id, shape.adjusted_rows, self._table.tensor)
            drawn = draw_from_shards(own, shape.leaders, shard.out_features, gather_ranks)
            keeps_logits = shape.leaders > 1
        else:
            if shard is not None:
                logits = shard.gather(logits)
            drawn = draw_packed(
                logits,
                packed,
                num_slots=shape.adjusted_rows,
                truncates=shape.truncates,
                table=self._table.tensor,
            ).tokens
        _walk(drawn, inputs, shape, result)
        return _Launched(result, drawn, logits if keeps_logits else None, raw)

    def _summaries(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        """Summaries of the whole vocabulary. logits: of this rank's share."""
        shard = self._runner.vocabulary_shard
        if shard is None:
            return summarize(logits, k)
        return gather_ranks(merged(summarize(logits, k, shard.first_id)))


def _mask_parts(masks: RowMasks, num_logits: int) -> list[Part]:
    """Words and index of `mask_logits`; rows of padding have mask 0."""
    words = masks.words
    tier = max(1, power_tier(len(words)))
    return [Part(words, (tier, words.shape[1])), Part(masks.rows, (num_logits,))]


def _walk(drawn: torch.Tensor, inputs: DeviceInputs, shape: _Shape, result: torch.Tensor) -> None:
    """Fill the walked trees of `result`. A walk ends at a row without a token."""
    _, tokens, parents, offsets = inputs.more[:4]
    walk_trees(drawn, tokens, parents, offsets, _walked(result, len(offsets) - 1, shape))


def _walked(result: torch.Tensor, num_trees: int, shape: _Shape) -> torch.Tensor:
    """[trees, 2 + nodes]"""
    return result[: num_trees * (2 + shape.nodes)].view(num_trees, -1)


@njit(cache=True, nogil=True)
def _outcomes(values, num_trees, width):  # type: ignore[no-untyped-def]
    """Nodes, ends and next tokens as of `Emitted`, and whether every next token is determined. values: int64, of which
    the first num_trees * width are walked trees."""
    nodes, ends = np.empty(num_trees * (width - 2), np.int32), np.zeros(num_trees + 1, np.int64)
    next_tokens = np.empty(num_trees, np.int64)
    count, is_told = 0, True
    for tree in range(num_trees):
        walked = values[tree * width : (tree + 1) * width]
        for place in range(walked[0]):
            nodes[count] = walked[2 + place]
            count += 1
        ends[tree + 1], next_tokens[tree] = count, walked[1]
        is_told = is_told and walked[1] >= 0
    return nodes[:count], ends, next_tokens, is_told


def _successors(values: np.ndarray, rows: int, k: int) -> Successors | None:
    """A copy of the first `rows` rows. values: int64, as `likeliest_of` writes them."""
    if not k:
        return None
    ids, bits = values[: rows * k].view(np.int32).reshape(-1, 2).T.copy()
    return Successors(ids, bits.view(np.float32), k)
