"""Prompt lookup: drafts what followed the most recent occurrence of the sequence's last few tokens.

After Saxena, "Prompt Lookup Decoding" (2023), which scans the sequence for the first occurrence. Here an index of all
n-grams is kept up to date, so that a round costs the same at any length.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from numba import njit

from actors.draft_tree import DraftTree
from actors.drafters._options import Floor, between
from actors.drafters.contract import CpuDrafter, DraftContext
from cache_service.splitmix64 import STEP

Int32Array = npt.NDArray[np.int32]

# Longest n-gram looked up. In a replay of 96 greedy answers of SmolLM2-135M-Instruct to Spec-Bench prompts, tokens a
# round were 1.81, 2.05, 2.05, 2.06 for lengths up to 1, 2, 3, 4, and 1.89 without single tokens.
_MAX_NGRAM = 3
MAX_NGRAM = 64  # limit of the option: every token is hashed once for each length

# Probability that the token after a match is the target's, by match length (index 0 is unused). From the same replay.
# The planner calibrates it online.
_ACCEPTANCE = np.array([0.0, 0.25, 0.55, 0.68, 0.74, 0.79, 0.85, 0.88, 0.90], dtype=np.float32)

_FLOOR = 0.03  # below, a node does not pay even where rows are nearly free


class _NgramIndex:
    """The tokens of one sequence, and the last end of each of their n-grams."""

    __slots__ = ("indexed", "size", "table", "text")

    def __init__(self) -> None:
        self.text: Int32Array = np.empty(0, np.int32)
        # [max_ngram, slots], slots a power of two: for each n-gram length, the number of tokens up to its end; 0: free.
        self.table: Int32Array = np.empty((0, 0), np.int32)
        self.size = 0
        self.indexed = 0  # n-grams that end within the first `indexed` tokens are in the table

    @property
    def memory_bytes(self) -> int:
        return self.text.nbytes + self.table.nbytes

    def append(self, tokens: npt.NDArray[np.int32], max_ngram: int) -> None:
        size = self.size + len(tokens)
        if size > len(self.text):
            room = max(64, 1 << (size - 1).bit_length())
            text = np.empty(room, np.int32)
            text[: self.size] = self.text[: self.size]
            self.text = text
            # Twice as many slots as there can be n-grams keep probing short. The next look-up fills them again.
            self.table = np.zeros((max_ngram, 2 * room), np.int32)
            self.indexed = 0
        self.text[self.size : size] = tokens
        self.size = size


class PromptLookupDrafter(CpuDrafter):
    """Drafts the chain of tokens that followed the most recent occurrence of the longest n-gram found."""

    name = "prompt_lookup"

    def __init__(self, *, max_ngram: Annotated[int, between(1, MAX_NGRAM)] = _MAX_NGRAM, floor: Floor = _FLOOR) -> None:
        """max_ngram: longest n-gram looked up; floor: lowest confidence of a node."""
        self._max_ngram = max_ngram
        self._floor = floor
        self._indexes: dict[int, _NgramIndex] = {}
        self._warm_up()

    def forget(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)

    def memory_bytes(self) -> int:
        return sum(index.memory_bytes for index in self._indexes.values())

    def _propose_one(self, context: DraftContext) -> DraftTree:
        index = self._indexes.get(context.seq_id)
        if index is None or index.size != context.start:
            index = self._indexes[context.seq_id] = _NgramIndex()
        index.append(context.tokens[index.size :], self._max_ngram)
        room = max(context.max_nodes, 0)
        token_ids = np.empty(room, np.int32)
        confidence = np.empty(room, np.float32)
        count = _index_and_draft(
            index.text,
            index.table,
            index.indexed,
            index.size,
            self._max_ngram,
            _ACCEPTANCE,
            self._floor,
            token_ids,
            confidence,
        )
        index.indexed = max(index.size - 1, 0)
        return DraftTree.chain(token_ids[:count], confidence[:count]) if count else DraftTree.empty()

    def _warm_up(self) -> None:
        index = _NgramIndex()
        index.append(np.array([1, 2, 1], np.int32), self._max_ngram)
        _index_and_draft(
            index.text, index.table, 0, 3, self._max_ngram, _ACCEPTANCE, self._floor,
            np.empty(2, np.int32), np.empty(2, np.float32),
        )  # fmt: skip


@njit(cache=True, nogil=True)
def _slot_of(text, table, end, ngram):  # type: ignore[no-untyped-def]
    """The slot of the n-gram that ends at `end`, or the free one where it belongs."""
    key = np.uint64(0)
    for position in range(end - ngram, end):
        key = (key ^ np.uint64(np.uint32(text[position]))) * np.uint64(STEP)
        key ^= key >> np.uint64(32)
    mask = np.int64(table.shape[1] - 1)
    slot = np.int64(key >> np.uint64(16)) & mask
    while True:
        other = table[ngram - 1, slot]
        if other == 0:
            return slot
        back = 1
        while back <= ngram and text[other - back] == text[end - back]:
            back += 1
        if back > ngram:
            return slot
        slot = (slot + 1) & mask


@njit(cache=True, nogil=True)
def _index_and_draft(  # type: ignore[no-untyped-def]
    text, table, indexed, size, max_ngram, acceptance, floor, token_ids, confidence
):
    # The n-grams that end with the last token are looked up, not indexed: nothing has followed them yet.
    for end in range(indexed + 1, size):
        for ngram in range(1, min(max_ngram, end) + 1):
            table[ngram - 1, _slot_of(text, table, end, ngram)] = end
    if len(token_ids) == 0:
        return 0
    for ngram in range(min(max_ngram, size - 1), 0, -1):
        begin = np.int64(table[ngram - 1, _slot_of(text, table, size, ngram)])
        if begin == 0:
            continue
        sure = np.float32(1)
        count = 0
        while count < len(token_ids):
            sure *= acceptance[min(ngram + count, len(acceptance) - 1)]
            if sure < floor:
                break
            # At the end of the text, the draft repeats itself from its start, as a period.
            token_ids[count] = text[begin + count % (size - begin)]
            confidence[count] = sure
            count += 1
        return count
    return 0
