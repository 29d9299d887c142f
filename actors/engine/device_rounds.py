"""Rounds on an accelerator: one copy up, launches that read nothing of the host, one copy down.

With tensor parallelism each rank draws from its share of the vocabulary, and ranks exchange a few words a row, and the
likeliest tokens of their shares where these are asked for. Kept logits need whole rows. So does, in a second launch, a
tree whose walk comes to a row that these words do not tell the token of.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import NamedTuple

import numpy as np
import torch

from actors.engine.arena import Part
from actors.engine.batch import NODES_OF_A_WORD, PackedBatch, SequenceRows, num_words, pack
from actors.engine.device_inputs import DeviceInputs
from actors.engine.draft_trees import largest_tree
from actors.engine.draws import Draws, Emitted
from actors.engine.model_runner import ModelRunner, last_rows
from actors.engine.row_tiers import power_tier, row_tier
from actors.messages import Successors
from actors.models.collectives import gather_ranks
from actors.sampling.adjustment_table import AdjustmentTable
from actors.sampling.device_sampling import NO_TREE, draw, draw_packed, walk_trees
from actors.sampling.device_shards import Shard, draw_from_shards, num_leaders
from actors.sampling.device_successors import likeliest_of, merged, summarize
from actors.sampling.packed_rows import pack_sampling


class _Shape(NamedTuple):
    """Sizes of a round's draws, with padding."""

    adjusted_rows: int  # rows with penalties or bias
    truncates: bool  # whether a row has top-k, top-p or min-p
    nodes: int  # of a tree
    successors: int
    keeps_logits: bool
    is_sharded: bool  # ranks draw from their shares of the vocabulary
    leaders: int  # then, of each rank, as of `num_leaders`
    table: int  # generation of the table of adjustments


class _Launched(NamedTuple):
    """A round's results on the device, in memory that the next round may reuse."""

    result: torch.Tensor  # int64: walked trees, [trees, 2 + nodes], then successors as of `likeliest_of`, [logits, k]
    drawn: torch.Tensor  # int64 [logits]; negative: not told
    logits: torch.Tensor | None  # kept whole, or of this rank's share where tokens may be missing


class DeviceRounds:
    """As `HostRounds`; the tokens are the same. Needs a runner with device inputs."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self.draw_on_all_ranks = runner.vocabulary_shard is not None
        self._table = AdjustmentTable(runner.device)
        self.rows_for = self._table.rows_for

    def run(self, parts: Sequences[SequenceRows], wanted: Sequences[int], draws: Draws | None) -> Emitted | None:
        batch = pack(parts, None if draws is None or draws.num_trees < len(parts) else draws.trees)
        # Each rank of a group computes as many rows of logits, whether it draws or not.
        num_trees = power_tier(sum(count > 0 for count in wanted))
        num_logits = row_tier(sum(wanted))
        rows = last_rows(batch.first_rows, np.array(wanted))
        # Where all rows are drawn from, rows and sequences determine the numbers of logits and trees.
        may_record = len(rows) == batch.num_rows
        if draws is None:
            inputs = self._runner.send(batch, rows, num_logits)
            self._runner.launch(inputs, None, lambda: self._compute(inputs), may_record=may_record)
            return None
        more, shape = self._lay_out(draws, num_trees, num_logits)
        inputs = self._send(batch, rows, num_logits, more)
        launched = self._runner.launch(inputs, shape, lambda: self._launch(inputs, shape), may_record=may_record)
        values = launched.result.cpu().numpy()
        self._table.confirm()
        size = num_trees * (2 + shape.nodes)
        walked = values[:size].reshape(num_trees, 2 + shape.nodes)
        own = draws.num_trees
        unfinished = np.flatnonzero(walked[:own, 1] < 0)
        if len(unfinished):
            self._redraw(draws, unfinished, launched, inputs, shape)
            walked = _walked(launched.result, num_trees, shape).cpu().numpy()
        nodes, counts = walked[:own, 2:].astype(np.int32), walked[:own, 0].tolist()
        paths = [row[:count] for row, count in zip(nodes, counts, strict=True)]
        return Emitted(
            next_tokens=walked[:own, 1].tolist(),
            paths=paths,
            successors=_successors(values[size:].reshape(num_logits, -1)[: len(rows)]),
            logits=launched.logits if draws.keeps_logits else None,
        )

    def _send(self, batch: PackedBatch, rows: np.ndarray, num_logits: int, more: Sequences[Part]) -> DeviceInputs:
        """As `ModelRunner.send`; brings the table of adjustments up to date."""
        places, contents = self._table.updates
        size = power_tier(len(places))
        updates = [Part(contents, (size, contents.shape[1])), Part(places, (size,), self._table.capacity)]
        inputs = self._runner.send(batch, rows, num_logits, more, updates)
        if size:
            contents_there, places_there = inputs.updates
            self._table.write(places_there, contents_there)
        return inputs

    @torch.inference_mode()
    def _redraw(
        self, draws: Draws, trees: np.ndarray, launched: _Launched, inputs: DeviceInputs, shape: _Shape
    ) -> None:
        """Draw the missing tokens of some trees (int64 [n]) from whole rows, and walk again. On all ranks at once."""
        shard = self._runner.vocabulary_shard
        assert shard is not None
        assert launched.logits is not None
        offsets = draws.trees.offsets
        rows = np.concatenate([np.arange(offsets[tree] + tree, offsets[tree + 1] + tree + 1) for tree in trees])
        rows = rows[launched.drawn.cpu().numpy()[rows] < 0]
        places = torch.from_numpy(rows).to(launched.drawn.device)
        whole = shard.gather(launched.logits[places])
        launched.drawn[places] = draw(whole, draws.sampling.take(rows), table=self._table.tensor).tokens
        _walk(launched.drawn, inputs, shape, launched.result)

    def _lay_out(self, draws: Draws, num_trees: int, num_logits: int) -> tuple[list[Part], _Shape]:
        sampling, trees = draws.sampling, draws.trees
        shard = self._runner.vocabulary_shard
        is_sharded = shard is not None and not draws.keeps_logits
        packed = pack_sampling(sampling, self._vocab_size, num_logits)
        more = [
            Part(packed.rows, (packed.num_words,), following=packed.adjustments),
            Part(trees.tokens, (num_logits,)),
            Part(trees.parents, (num_logits,)),
            Part(trees.offsets.astype(np.int32), (num_trees + 1,), NO_TREE),
        ]
        return more, _Shape(
            adjusted_rows=packed.num_slots,
            truncates=packed.truncates,
            nodes=NODES_OF_A_WORD * num_words(largest_tree(trees.offsets)),
            successors=min(draws.num_successors, self._vocab_size),
            keeps_logits=draws.keeps_logits,
            is_sharded=is_sharded,
            leaders=num_leaders(sampling) if is_sharded else 0,
            table=self._table.generation,
        )

    def _compute(self, inputs: DeviceInputs) -> None:
        """Fill the KV slots of rows that nothing is drawn from."""
        self._runner.compute(inputs)

    @torch.inference_mode()
    def _launch(self, inputs: DeviceInputs, shape: _Shape) -> _Launched:
        packed, _, _, offsets = inputs.more
        logits = self._runner.compute(inputs)
        size = (len(offsets) - 1) * (2 + shape.nodes)
        result = logits.new_empty(size + len(logits) * shape.successors, dtype=torch.int64)
        if shape.successors:
            likeliest_of(self._summaries(logits, shape.successors), result[size:].view(len(logits), -1))
        shard = self._runner.vocabulary_shard
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
        return _Launched(result, drawn, logits if keeps_logits else None)

    def _summaries(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        """Summaries of the whole vocabulary. logits: of this rank's share."""
        shard = self._runner.vocabulary_shard
        if shard is None:
            return summarize(logits, k)
        return gather_ranks(merged(summarize(logits, k, shard.first_id)))


def _walk(drawn: torch.Tensor, inputs: DeviceInputs, shape: _Shape, result: torch.Tensor) -> None:
    """Fill the walked trees of `result`. A walk ends at a row without a token."""
    _, tokens, parents, offsets = inputs.more
    walk_trees(drawn, tokens, parents, offsets, _walked(result, len(offsets) - 1, shape))


def _walked(result: torch.Tensor, num_trees: int, shape: _Shape) -> torch.Tensor:
    """[trees, 2 + nodes]"""
    return result[: num_trees * (2 + shape.nodes)].view(num_trees, -1)


def _successors(values: np.ndarray) -> Successors | None:
    """values: int64 [rows, k], of `likeliest_of`."""
    k = values.shape[1]
    if not k:
        return None
    ids, bits = np.ascontiguousarray(values.view(np.int32).reshape(-1, 2).T)
    return Successors(ids, bits.view(np.float32), k)
