"""Prompt chunks of a round: sequences with many rows, each of which sees all slots before it and none after it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from actors.engine.batch import PackedBatch

# With fewer rows, the tree kernel splits the keys of a row among programs (`UNSPLIT_ROWS`); torch's kernel for ragged
# batches does not. On an H200, the tree kernel took 0.74 to 0.86 of the other's time for 256 rows, 1.3 to 1.6 times as
# long for 1,024.
CHUNK_ROWS = 257


class PromptChunks(NamedTuple):
    """n sequences with C rows in all, which are the last of their K slots. All tensors are on the device."""

    sequences: torch.Tensor  # int64 [n]
    rows: torch.Tensor  # int64 [C]: packed rows, one sequence after the other
    key_slots: torch.Tensor  # int64 [K]: physical slots, likewise
    row_starts: torch.Tensor  # int32 [n + 1]: offsets into `rows`
    key_starts: torch.Tensor  # int32 [n + 1]: offsets into `key_slots`
    most_rows: int  # of a sequence
    most_keys: int
    other_context: int  # slots of the longest other sequence; 0 if there is none


class PackedChunks(NamedTuple):
    """`PromptChunks` on the host, their tensors in one array."""

    words: np.ndarray  # int64
    num_sequences: int
    num_rows: int
    num_keys: int
    most_rows: int
    most_keys: int
    other_context: int

    def on_device(self, words: torch.Tensor) -> PromptChunks:
        """words: int64, the array on the device, with any padding."""
        sizes = [self.num_sequences, self.num_rows, self.num_keys]
        sequences, rows, key_slots = words[: sum(sizes)].split(sizes)
        starts = words[sum(sizes) :].view(torch.int32)[: 2 * (self.num_sequences + 1)]
        row_starts, key_starts = starts.split(self.num_sequences + 1)
        return PromptChunks(
            sequences, rows, key_slots, row_starts, key_starts, self.most_rows, self.most_keys, self.other_context
        )


def may_have_chunks(most_rows: int) -> bool:
    """most_rows: of a sequence of the round."""
    return most_rows >= CHUNK_ROWS


def pack_chunks(batch: PackedBatch) -> PackedChunks | None:
    """The prompt chunks of a batch; None without."""
    counts, contexts = np.diff(batch.first_rows), batch.contexts
    if not may_have_chunks(int(counts.max(initial=0))):
        return None
    is_chunk = (counts >= CHUNK_ROWS) & (batch.tree_starts == contexts)  # no tree that branches
    sequences = np.flatnonzero(is_chunk)
    if not len(sequences):
        return None
    rows = [np.arange(batch.first_rows[s], batch.first_rows[s + 1]) for s in sequences]
    slots = [_slots_of(batch, s, contexts[s]) for s in sequences.tolist()]
    starts = np.zeros((2, len(sequences) + 1), np.int32)
    np.cumsum([counts[sequences], contexts[sequences]], axis=1, out=starts[:, 1:])
    return PackedChunks(
        words=np.concatenate([sequences, *rows, *slots, starts.reshape(-1).view(np.int64)]),
        num_sequences=len(sequences),
        num_rows=int(starts[0, -1]),
        num_keys=int(starts[1, -1]),
        most_rows=int(counts[sequences].max()),
        most_keys=int(contexts[sequences].max()),
        other_context=int(contexts[~is_chunk].max(initial=0)),
    )


def _slots_of(batch: PackedBatch, sequence: int, context: int) -> np.ndarray:
    """int64 [context]: the physical slots of a sequence."""
    blocks = batch.block_tables[sequence, : -(-context // batch.block_size)].astype(np.int64)
    slots: np.ndarray = (blocks[:, None] * batch.block_size + np.arange(batch.block_size)).reshape(-1)[:context]
    return slots
