"""Batches of the engine: prefill chunks, decoding with draft trees, trees that have grown before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.draft_tree import depths_of
from actors.engine.batch import PackedBatch, SequenceRows, pack
from actors.engine.block_pool import BlockPool
from actors.engine.sequence import Sequence
from actors.messages import SamplingParams, SequenceStart


@dataclass(frozen=True)
class Forest:
    parts: list[SequenceRows]
    batch: PackedBatch
    block_size: int
    num_slots: int

    def visible(self, index: int, window: int | None) -> np.ndarray:
        """bool [rows, context]: which logical slots each row of a sequence may attend to."""
        part = self.parts[index]
        known = part.sequence.num_computed + part.count
        positions = slot_positions(part)
        context = len(positions)
        allowed = np.tri(context, dtype=bool)
        allowed[known:, known:] = ancestor_mask(part.tree_parents)
        if window is not None and window < 0:
            allowed &= positions[:, None] // -window == positions[None] // -window
        elif window is not None:
            allowed &= positions[:, None] - positions[None] < window
        return allowed[context - part.num_rows :]


def slot_positions(part: SequenceRows) -> np.ndarray:
    """int64 [context]: positions of a sequence's committed tokens and draft nodes."""
    known = part.sequence.num_computed + part.count
    return np.append(np.arange(known), known - 1 + depths_of(part.tree_parents))


def ancestor_mask(parents: np.ndarray) -> np.ndarray:
    """bool [n, n]: row i is true at node i itself and at each of its ancestors."""
    mask = np.eye(len(parents), dtype=bool)
    for index, parent in enumerate(parents):
        if parent >= 0:
            mask[index] |= mask[parent]
    return mask


def forest_of(parts: list[tuple[int, int, list[int], int]], block_size: int = 4) -> Forest:
    """parts: known tokens, how many of them are computed, parents of the draft tree, and its first node to compute.

    Blocks are taken in turn, so that sequences are not contiguous.
    """
    ends = [known + len(parents) for known, _, parents, _ in parts]
    num_blocks = sum(-(-end // block_size) for end in ends) + 1
    pool = BlockPool(num_blocks, block_size)
    sequences = []
    for index, (known, computed, _, _) in enumerate(parts):
        sequence = Sequence(index + 1, SequenceStart(SamplingParams(seed=1), known), pool)
        sequence.extend(np.arange(known, dtype=np.int32))
        sequence.num_computed = computed
        sequences.append(sequence)
    for room in range(block_size, max(ends) + block_size, block_size):
        for sequence, end in zip(sequences, ends, strict=True):
            assert sequence.reserve(min(room, end))
    rows = [
        SequenceRows(
            sequence, known - computed, np.arange(len(parents), dtype=np.int32), np.array(parents, np.int32), first_node
        )
        for sequence, (known, computed, parents, first_node) in zip(sequences, parts, strict=True)
    ]
    return Forest(rows, pack(rows), block_size, num_blocks * block_size)
