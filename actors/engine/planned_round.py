"""A round whose deltas have been applied: the rows to compute, and the rows to draw tokens from."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import cast

import numpy as np
from numba import njit

from actors.engine.batch import PackedBatch, SequenceRows, pack_shapes
from actors.engine.draft_trees import Trees, joined, logit_places, tree_paths
from actors.engine.round_items import READY
from actors.engine.sequence import Sequence
from actors.engine.sequence_table import TakenIn
from actors.sampling.rows import Paths, RowSampling, rows_for


@dataclass(slots=True)
class PlannedRound:
    """S sequences that are ready. A sequence that has tokens left to compute emits nothing and has no nodes."""

    sequences: Sequences[Sequence]
    items: np.ndarray  # ITEM [S]
    trees: Trees  # one per sequence, cut to the nodes that the sequence has room for
    num_emitting: int  # T

    @property
    def emitting(self) -> np.ndarray:
        """int64 [T]: places of the sequences that emit."""
        return self.items["is_last"].nonzero()[0]

    @property
    def emitting_trees(self) -> Trees:
        """The trees of the T sequences that emit; the others have no nodes."""
        if self.num_emitting == len(self.items):
            return self.trees
        offsets = np.zeros(self.num_emitting + 1, np.int64)
        offsets[1:] = self.trees.offsets[1:][self.emitting]
        return Trees(self.trees.tokens, self.trees.parents, offsets)

    def parts(self) -> list[SequenceRows]:
        tokens, parents, offsets = self.trees
        return [
            SequenceRows(sequence, count, tokens[begin:end], parents[begin:end])
            for sequence, count, begin, end in zip(
                self.sequences, self.items["count"].tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True
            )
        ]

    def pack(self) -> PackedBatch:
        shapes = np.zeros((len(self.items), 3), np.int64)
        shapes[:, 0], shapes[:, 1] = self.items["sequence"], self.items["count"]
        return pack_shapes(self.sequences[0].block_size, shapes, self.trees)

    def sampling(self) -> RowSampling:
        """Parameters of each row of logits of the T trees: a root gives the token at index `length`, a node of depth d
        that at `length` + d."""
        sequences = [self.sequences[place] for place in self.emitting.tolist()]
        return row_sampling(sequences, self.emitting_trees)


def row_sampling(sequences: Sequences[Sequence], trees: Trees) -> RowSampling:
    """As `PlannedRound.sampling`, for sequences that all emit. trees: one for each."""
    samplings = [sequence.sampling for sequence in sequences]
    lengths = np.array([sequence.length for sequence in sequences])
    row_sequence, positions = logit_places(trees.parents, trees.offsets, lengths)
    paths = None
    if any(sampling.uses_history for sampling in samplings):
        paths = Paths(*tree_paths(*trees))
    return rows_for(samplings, row_sequence, positions, paths)


def planned(taken: TakenIn, trees: Trees) -> PlannedRound:
    """The round of the sequences that are ready. trees: one for each item of `taken`.

    A sequence with tokens left to compute gets no tree. A tree that there is too little room for is cut to its first
    nodes: under the rejection rule, the choice of nodes must not depend on their tokens.
    """
    items = taken.items
    if taken.num_ready == len(items) and taken.num_nodes == len(trees.tokens):
        return PlannedRound(cast("Sequences[Sequence]", taken.sequences), items, trees, taken.num_emitting)
    ready = np.flatnonzero(items["status"] == READY)
    begins = trees.offsets[:-1][ready]
    ends = begins + items["num_nodes"][ready]
    pieces = [slice(begin, end) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    cut = joined([trees.tokens[piece] for piece in pieces], [trees.parents[piece] for piece in pieces])
    sequences = [cast("Sequence", taken.sequences[place]) for place in ready.tolist()]
    return PlannedRound(sequences, items[ready], cut, taken.num_emitting)


@njit(cache=True, nogil=True)
def wanted_rows(items, first_rows):  # type: ignore[no-untyped-def]
    """int64: the rows of logits that are drawn from, the last ones of each sequence that emits. items: ITEM [S].
    first_rows: int32 [S + 1]."""
    rows = np.empty(first_rows[len(items)], np.int64)
    count = 0
    for s in range(len(items)):
        if items[s].is_last:
            for row in range(first_rows[s + 1] - 1 - items[s].num_nodes, first_rows[s + 1]):
                rows[count] = row
                count += 1
    return rows[:count]
