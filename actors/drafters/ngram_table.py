"""N-gram counts: drafts the token that most often followed the last tokens, then the next one, and so on.

Compare Ou et al., "Lossless Acceleration of Large Language Model via Adaptive N-gram Parallel Decoding" (2024). Counts
come from the prompt, the output, and the target's likely tokens at every row it computed, accepted or not. One level
has contexts of one length only; several levels try the longest first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Literal, cast

import numpy as np
from numba import njit

from actors.draft_tree import DraftTree
from actors.drafters._options import Floor, between
from actors.drafters.contract import MAX_CONTEXT, CpuDrafter, DraftContext, VerifiedRows
from actors.errors import InvalidRequest
from cache_service.splitmix64 import STEP
from cache_service.store.fair_share import first_to_give_way

_FLOOR = 0.03
_MAX_NGRAMS = 1 << 18  # limit of a table; 64 to 128 bytes each
_BUDGET_BYTES = 256 << 20  # limit of all tables together
_FIRST_SLOTS = 1 << 10
_SLOT_BYTES = 32  # a slot of all columns
_LARGEST_SHARE = 4  # one call fills at most a quarter of a table, so that a long prompt does not displace all else


class _Table:
    """Two hash tables with open addressing: contexts with their best token, and n-grams with their counts.

    At most half of the slots are filled, so a probe always ends.
    """

    __slots__ = ("best", "best_count", "contexts", "ngrams", "num_contexts", "num_ngrams", "occurrences", "totals")

    def __init__(self, slots: int = _FIRST_SLOTS) -> None:
        self.clear(slots)

    def clear(self, slots: int = _FIRST_SLOTS) -> None:
        """slots: a power of two."""
        self.contexts = np.zeros(slots, np.uint64)  # hash; 0: free
        self.best = np.zeros(slots, np.int32)
        self.best_count = np.zeros(slots, np.int32)
        self.totals = np.zeros(slots, np.int32)
        self.ngrams = np.zeros(slots, np.uint64)
        self.occurrences = np.zeros(slots, np.int32)
        self.num_ngrams = 0
        self.num_contexts = 0

    @property
    def memory_bytes(self) -> int:
        return _SLOT_BYTES * len(self.ngrams)

    def count(self, contexts: np.ndarray, token_ids: np.ndarray, *, shortest: int, longest: int, most: int) -> None:
        """Count token_ids (int32 [n]) after contexts (int32 [n, MAX_CONTEXT]); if they are many, only the last. A table
        that would exceed `most` n-grams is cleared first: recent text matters more than old text."""
        levels = longest - shortest + 1
        rows = max(1, most // (_LARGEST_SHARE * levels))
        # Fresh copies: numba would compile another version for read-only arrays and other layouts.
        contexts = np.array(contexts[-rows:], np.int32, order="C")
        token_ids = np.array(token_ids[-rows:], np.int32, order="C")
        added = len(token_ids) * levels
        if max(self.num_ngrams, self.num_contexts) + added > most:
            self.clear()
        filled = max(self.num_ngrams, self.num_contexts) + added
        if 2 * filled > len(self.ngrams):
            self._grow(_slots_for(filled))
        new_ngrams, new_contexts = _count(
            contexts, token_ids, shortest, longest,
            self.contexts, self.best, self.best_count, self.totals, self.ngrams, self.occurrences,
        )  # fmt: skip
        self.num_ngrams += new_ngrams
        self.num_contexts += new_contexts

    def _grow(self, slots: int) -> None:
        grown = _Table(slots)
        _copy(self.contexts, grown.contexts, (self.best, self.best_count, self.totals),
              (grown.best, grown.best_count, grown.totals))  # fmt: skip
        _copy(self.ngrams, grown.ngrams, (self.occurrences,), (grown.occurrences,))
        self.contexts, self.best, self.best_count = grown.contexts, grown.best, grown.best_count
        self.totals, self.ngrams, self.occurrences = grown.totals, grown.ngrams, grown.occurrences


class NgramTableDrafter(CpuDrafter):
    """Chains of most frequent successors, from a table of the sequence alone or of everything in its namespace."""

    name = "ngram_table"
    num_successors = 3
    successors_option = "filler_top_k"

    def __init__(
        self,
        *,
        n: Annotated[int, between(2, MAX_CONTEXT + 1)] = 4,
        levels: Literal["one", "many"] = "many",
        filler_top_k: Annotated[int, between(1, 64)] = 3,
        keep: Literal["request", "namespace"] = "namespace",
        unknown: Literal["stop", "random"] = "stop",
        max_ngrams: Annotated[int, between(64, 1 << 28)] = _MAX_NGRAMS,
        budget_bytes: int = _BUDGET_BYTES,
        floor: Floor = _FLOOR,
    ) -> None:
        """n: tokens of an n-gram. levels: contexts of n - 1 tokens only, or of 1 to n - 1.
        filler_top_k: likeliest tokens of every row that are counted, too; 1: only emitted tokens. keep: scope of a
        table. unknown: after an unknown context, stop or draft a random token. max_ngrams: limit of a table.
        budget_bytes: limit of all tables; beyond it, the least recently used tables of the largest owner are dropped.

        Raises InvalidRequest for a budget_bytes without room for one table.
        """
        largest = _SLOT_BYTES * max(_FIRST_SLOTS, _slots_for(max_ngrams))
        if budget_bytes < largest:
            raise InvalidRequest("budget_bytes", budget_bytes, f"one table of {max_ngrams} n-grams takes {largest}")
        self.num_successors = filler_top_k
        self._longest = n - 1
        self._shortest = n - 1 if levels == "one" else 1
        self._by_request = keep == "request"
        self._is_random = unknown == "random"
        self._max_ngrams = max_ngrams
        self._budget_bytes = budget_bytes
        self._floor = float(floor)
        self._tables: OrderedDict[int | str, _Table] = OrderedDict()  # least recently used first
        self._num_bytes = 0  # sum over all tables
        self._num_seen: dict[int, int] = {}
        self._warm_up()

    def forget(self, seq_id: int) -> None:
        self._num_seen.pop(seq_id, None)
        if self._by_request and seq_id in self._tables:
            self._num_bytes -= self._tables.pop(seq_id).memory_bytes

    def drop_namespace(self, namespace: str) -> None:
        """Clear a namespace's table. It is kept, so that running sequences count only their new tokens in it."""
        table = self._tables.get(namespace)
        if table is not None:
            self._num_bytes -= table.memory_bytes
            table.clear()
            self._num_bytes += table.memory_bytes

    def memory_bytes(self) -> int:
        return self._num_bytes

    def remember(self, rows: VerifiedRows) -> None:
        """Count the likeliest tokens of rows with soft labels. Committed tokens are counted in `propose`."""
        top = min(self.num_successors, rows.token_ids.shape[1])
        if top < 2:
            return
        is_soft = rows.probs[:, 1] > 0.0
        if self._by_request:
            for seq_id in np.unique(rows.sequences[is_soft]).tolist():
                if seq_id in self._tables:  # otherwise the sequence does not use this drafter
                    self._count_fillers(seq_id, rows, is_soft & (rows.sequences == seq_id), top)
        elif is_soft.any():
            self._count_fillers(rows.namespace, rows, is_soft, top)

    def _count_fillers(self, key: int | str, rows: VerifiedRows, chosen: np.ndarray, top: int) -> None:
        contexts = np.repeat(rows.contexts[chosen], top, axis=0)
        self._count_in(key, contexts, rows.token_ids[chosen, :top].reshape(-1))

    def _count_in(self, key: int | str, contexts: np.ndarray, token_ids: np.ndarray) -> _Table:
        """Count in the table of `key`, which becomes the most recently used."""
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = _Table()
            self._num_bytes += table.memory_bytes
        self._tables.move_to_end(key)
        before = table.memory_bytes
        self._count(table, contexts, token_ids)
        self._num_bytes += table.memory_bytes - before
        while self._num_bytes > self._budget_bytes:
            self._num_bytes -= self._tables.pop(self._first_to_give_way()).memory_bytes
        return table

    def _count(self, table: _Table, contexts: np.ndarray, token_ids: np.ndarray) -> None:
        table.count(contexts, token_ids, shortest=self._shortest, longest=self._longest, most=self._max_ngrams)

    def _first_to_give_way(self) -> int | str:
        """Key of the table to drop. Never the most recently used: one table alone is within the budget."""
        if self._by_request:
            return next(iter(self._tables))
        names = cast(list[str], list(self._tables))
        return first_to_give_way(names, lambda name: self._tables[name].memory_bytes)

    def _propose_one(self, context: DraftContext) -> DraftTree:
        key = context.seq_id if self._by_request else context.namespace
        tokens = context.tokens
        if self._by_request and not context.start:
            self.forget(context.seq_id)
        # A table that was dropped is filled again from the whole sequence.
        seen = self._num_seen.get(context.seq_id, 0) if context.start and key in self._tables else 0
        first = min(max(seen, 1), len(tokens))
        # Contexts of all new tokens, with -1 before the text.
        before = np.full(max(0, MAX_CONTEXT - first), -1, np.int32)
        padded = np.concatenate([before, tokens[max(0, first - MAX_CONTEXT) :]])
        windows = np.lib.stride_tricks.sliding_window_view(padded, MAX_CONTEXT)
        table = self._count_in(key, windows[:-1], tokens[first:])
        self._num_seen[context.seq_id] = len(tokens)
        if context.max_nodes < 1:
            return DraftTree.empty()
        drafted, confidence = _draft(
            windows[-1].copy(), context.max_nodes, self._shortest, self._longest, self._is_random, self._floor,
            table.contexts, table.best, table.best_count, table.totals,
        )  # fmt: skip
        return DraftTree.chain(drafted, confidence) if len(drafted) else DraftTree.empty()

    def _warm_up(self) -> None:
        table = _Table(64)
        contexts = np.zeros((1, MAX_CONTEXT), np.int32)
        self._count(table, contexts, np.ones(1, np.int32))
        table._grow(128)
        _draft(contexts[0].copy(), 1, self._shortest, self._longest, False, 0.0, table.contexts, table.best,
               table.best_count, table.totals)  # fmt: skip


def _slots_for(filled: int) -> int:
    """The smallest power of two that is at least 2 * filled."""
    return 1 << (2 * filled - 1).bit_length()


@njit(cache=True, nogil=True)
def _hash(context, length):  # type: ignore[no-untyped-def]
    """Never 0."""
    key = np.uint64(length) * np.uint64(0xD6E8FEB86659FD93)
    for position in range(len(context) - length, len(context)):
        key = (key ^ np.uint64(np.uint32(context[position]))) * np.uint64(STEP)
        key ^= key >> np.uint64(29)
    return key | np.uint64(1)


@njit(cache=True, nogil=True)
def _slot(table, key):  # type: ignore[no-untyped-def]
    """The key's slot, or the free one where it belongs."""
    mask = np.uint64(len(table) - 1)
    slot = (key >> np.uint64(20)) & mask
    while table[slot] != 0 and table[slot] != key:
        slot = (slot + np.uint64(1)) & mask
    return slot


@njit(cache=True, nogil=True)
def _count(  # type: ignore[no-untyped-def]
    contexts, token_ids, shortest, longest, known, best, best_count, totals, ngrams, occurrences
):
    """Returns the numbers of new n-grams and new contexts."""
    new_ngrams, new_contexts = 0, 0
    width = contexts.shape[1]
    for row in range(len(token_ids)):
        token = token_ids[row]
        for length in range(shortest, longest + 1):
            if contexts[row, width - length] < 0:
                break
            key = _hash(contexts[row], length)
            pair = ((key ^ np.uint64(np.uint32(token))) * np.uint64(0xD6E8FEB86659FD93)) | np.uint64(1)
            slot = _slot(ngrams, pair)
            if ngrams[slot] == 0:
                ngrams[slot] = pair
                new_ngrams += 1
            occurrences[slot] += 1
            at = _slot(known, key)
            if known[at] == 0:
                known[at] = key
                new_contexts += 1
            totals[at] += 1
            if occurrences[slot] >= best_count[at]:  # the latest among equal counts
                best[at] = token
                best_count[at] = occurrences[slot]
    return new_ngrams, new_contexts


@njit(cache=True, nogil=True)
def _copy(keys, new_keys, columns, new_columns):  # type: ignore[no-untyped-def]
    for old in range(len(keys)):
        if keys[old] != 0:
            slot = _slot(new_keys, keys[old])
            new_keys[slot] = keys[old]
            for column, new_column in zip(columns, new_columns):  # noqa: B905
                new_column[slot] = column[old]


@njit(cache=True, nogil=True)
def _draft(  # type: ignore[no-untyped-def]
    last, max_nodes, shortest, longest, is_random, floor, known, best, best_count, totals
):
    token_ids = np.empty(max_nodes, np.int32)
    confidence = np.empty(max_nodes, np.float32)
    sure = np.float32(1)
    count = 0
    while count < max_nodes:
        token = np.int32(-1)
        for length in range(longest, shortest - 1, -1):
            if last[len(last) - length] < 0:
                continue
            at = _slot(known, _hash(last, length))
            if known[at] != 0:
                token = best[at]
                # + 1: a context seen once or twice has little confidence.
                sure *= np.float32(best_count[at]) / np.float32(totals[at] + 1)
                break
        if token < 0:
            if not is_random:
                break
            # Any token of the table: it is in the model's vocabulary.
            at = (_hash(last, 1) >> np.uint64(7)) % np.uint64(len(known))
            tried = 0
            while known[at] == 0 and tried < len(known):
                at = (at + np.uint64(1)) % np.uint64(len(known))
                tried += 1
            if known[at] == 0:
                break
            token = best[at]
            sure *= np.float32(0.01)
        elif sure < floor:
            break
        token_ids[count], confidence[count] = token, sure
        count += 1
        last[:-1] = last[1:]
        last[-1] = token
    return token_ids[:count].copy(), confidence[:count].copy()
