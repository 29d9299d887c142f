"""Rounds on an accelerator: one copy up, launches that read nothing of the host, one copy down.

With tensor parallelism each rank draws from its share of the vocabulary, and ranks exchange one key for each row.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import NamedTuple

import numpy as np
import torch

from actors.engine.arena import Part
from actors.engine.batch import SequenceRows, pack
from actors.engine.device_inputs import DeviceInputs
from actors.engine.draws import Draws, Emitted, most_probable
from actors.engine.model_runner import ModelRunner, last_rows
from actors.engine.row_tiers import power_tier, row_tier
from actors.messages import Successors
from actors.models.collectives import gather_ranks
from actors.sampling import device_sampling
from actors.sampling.packed_rows import pack_sampling


class _Shape(NamedTuple):
    """Of a round's draws, with padding."""

    adjusted_rows: int  # rows with penalties or bias
    truncates: bool  # whether a row has top-k, top-p or min-p
    nodes: int  # of a tree
    successors: int
    keeps_logits: bool
    is_sharded: bool  # ranks draw from their shares of the vocabulary


class DeviceRounds:
    """As `HostRounds`; the tokens are the same. Needs a runner with device inputs."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self.draw_on_all_ranks = runner.vocabulary_shard is not None

    def run(self, parts: Sequences[SequenceRows], wanted: Sequences[int], draws: Draws | None) -> Emitted | None:
        batch = pack(parts)
        # Each rank of a group computes as many rows of logits, whether it draws or not. A tree of padding has a root.
        emitting = sum(count > 0 for count in wanted)
        num_trees = row_tier(emitting)
        num_logits = row_tier(sum(wanted) - emitting + num_trees)
        rows = last_rows(batch.first_rows, np.array(wanted))
        if draws is None:
            inputs = self._runner.send(batch, rows, num_logits)
            self._runner.launch(inputs, None, lambda: self._compute(inputs))
            return None
        more, shape = self._lay_out(draws, num_trees, num_logits)
        inputs = self._runner.send(batch, rows, num_logits, more)
        result, logits = self._runner.launch(inputs, shape, lambda: self._launch(inputs, shape))
        values = result.cpu().numpy()
        size = num_trees * (2 + shape.nodes)
        walked = values[: 2 * size].view(np.int64).reshape(num_trees, 2 + shape.nodes)
        own = len(draws.trees.offsets) - 1
        paths = [row[2 : 2 + row[0]].astype(np.int32) for row in walked[:own]]
        return Emitted(
            next_tokens=walked[:own, 1].tolist(),
            paths=paths,
            successors=_successors(values[2 * size :].reshape(2, num_logits, -1)[:, : len(rows)]),
            logits=logits,
        )

    def _lay_out(self, draws: Draws, num_trees: int, num_logits: int) -> tuple[list[Part], _Shape]:
        sampling, trees = draws.sampling, draws.trees
        shard, successors = self._runner.vocabulary_shard, min(draws.num_successors, self._vocab_size)
        # The rest is asked of whole rows.
        is_sharded = not (shard is None or sampling.truncates.any() or successors or draws.keeps_logits)
        ids = shard.ids if shard is not None and is_sharded else None
        packed = pack_sampling(sampling, self._vocab_size if ids is None else len(ids), num_logits, ids)
        num_nodes = num_logits - num_trees
        more = [
            Part(packed.words, packed.words.shape),
            Part(trees.tokens, (num_nodes,)),
            Part(trees.parents, (num_nodes,)),
            Part(trees.offsets.astype(np.int32), (num_trees + 1,), len(trees.tokens)),
        ]
        return more, _Shape(
            adjusted_rows=packed.num_slots,
            truncates=packed.truncates,
            nodes=power_tier(max(1, int(np.diff(trees.offsets).max()))),
            successors=successors,
            keeps_logits=draws.keeps_logits,
            is_sharded=is_sharded,
        )

    def _compute(self, inputs: DeviceInputs) -> None:
        """Fill the KV slots of rows that nothing is drawn from."""
        self._runner.compute(inputs)

    @torch.inference_mode()
    def _launch(self, inputs: DeviceInputs, shape: _Shape) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int32: walked trees (int64 [trees, 2 + nodes]), then ids and float32 probabilities of the successors, [2,
        logits, successors]; and the logits if they are kept."""
        logits, shard = self._runner.compute(inputs), self._runner.vocabulary_shard
        if shard is not None and not shape.is_sharded:
            logits = shard.gather(logits)
        packed, tokens, parents, offsets = inputs.more
        of_shard = device_sampling.draw_packed(
            logits,
            packed,
            num_slots=shape.adjusted_rows,
            truncates=shape.truncates,
            first_id=shard.first_id if shard is not None and shape.is_sharded else 0,
        )
        drawn = of_shard.tokens
        if shape.is_sharded:
            keys = gather_ranks(of_shard.best_keys.amax(dim=1))
            drawn = device_sampling.tokens_of_shards(keys.t().contiguous())
        walked = device_sampling.walk_trees(drawn, tokens, parents, offsets, shape.nodes)
        results = [walked.view(torch.int32).view(-1)]
        if shape.successors:
            ids, probs = most_probable(logits, shape.successors)
            results += [ids.view(-1), probs.view(torch.int32).view(-1)]
        return torch.cat(results), logits if shape.keeps_logits else None


def _successors(values: np.ndarray) -> Successors | None:
    """values: int32 [2, rows, k], ids and the bits of their probabilities."""
    k = values.shape[2]
    if not k:
        return None
    ids, bits = np.ascontiguousarray(values)
    return Successors(ids.reshape(-1), bits.view(np.float32).reshape(-1), k)
