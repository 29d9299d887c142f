"""Drafts what the target found probable after the same last tokens before, in any sequence of the namespace.

It learns from every row that the target computes, accepted or not, so it improves with traffic even if no text repeats
(see `cache_service.counts.soft_ngram`). Each namespace has a table of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np

from actors.draft_tree import DraftTree
from actors.drafters._options import Floor, between
from actors.drafters.contract import MAX_CONTEXT, CpuDrafter, DraftContext, Outcome, VerifiedRows
from actors.errors import InvalidRequest
from cache_service.counts.soft_ngram import (
    MAX_SUCCESSORS,
    MIN_BYTES,
    SLOT_BYTES,
    Entries,
    SoftNgramTable,
    at_most,
    warm_up,
)
from cache_service.store.fair_share import first_to_give_way

_FLOOR = 0.002  # below, a node does not pay even where rows are nearly free

# A prompt's token is not the target's own prediction. In replays of Spec-Bench 0.05 drafts best, and 1 is worse than
# leaving prompts out.
_PROMPT_WEIGHT = 0.05

# Limit of the rows that another replica's counts of a context weigh, so that local counts soon outweigh them. In a
# replay of Spec-Bench, counts that are wrong in every context cost 1.1 % of the tokens a second with 1, and 2.2 %
# without a limit; counts of other requests bring 3.0 % with 1, and 3.9 % without.
_MERGED_ROWS = 1.0

_FIRST_BYTES = 1 << 20  # first size of a namespace's table, so that hundreds of small namespaces fit


class _Asked(NamedTuple):
    """The last proposal for a sequence."""

    namespace: str
    last_tokens: np.ndarray  # int32, at most `order`


class SoftNgramDrafter(CpuDrafter):
    """Best-first trees from a mixture of the successors of the last 0 to `order` tokens."""

    name = "soft_ngram"
    num_successors = MAX_SUCCESSORS
    successors_option = "successors"

    def __init__(
        self,
        *,
        order: Annotated[int, between(1, MAX_CONTEXT)] = 3,
        successors: Annotated[int, between(1, MAX_SUCCESSORS)] = MAX_SUCCESSORS,
        budget_bytes: int = 256 << 20,
        table_bytes: int = 32 << 20,
        delta_bytes: int = 0,
        floor: Floor = _FLOOR,
        prompt_weight: Annotated[float, between(0, 1)] = _PROMPT_WEIGHT,
        merged_rows: float = _MERGED_ROWS,
    ) -> None:
        """order: tokens of the longest context. successors: next tokens learnt from each row. budget_bytes: limit of
        all tables; beyond it, the least recently used of the largest owner are dropped. table_bytes: limit of one
        table, which starts small and grows. delta_bytes: part of each table for counts since `take_delta`.
        floor: lowest confidence of a node. prompt_weight: weight of a prompt's token, relative to a row of the target.
        merged_rows: limit of the rows that a context from another replica weighs.

        Raises InvalidRequest for bytes without room for a table, and for merged_rows.
        """
        least = max(delta_bytes, 0) + MIN_BYTES
        is_delta = delta_bytes == 0 or delta_bytes >= MIN_BYTES
        for name, value, is_right, limit in (
            ("delta_bytes", delta_bytes, is_delta, f"it must be 0 or at least {MIN_BYTES}"),
            ("budget_bytes", budget_bytes, budget_bytes >= least, f"one table takes at least {least}"),
            ("table_bytes", table_bytes, table_bytes >= least, f"one table takes at least {least}"),
            ("merged_rows", merged_rows, 0.0 < merged_rows <= 32.0, "it must be above 0 and at most 32"),
        ):
            if not is_right:
                raise InvalidRequest(name, value, limit)
        self.num_successors = successors
        self.order = order
        self._budget_bytes = budget_bytes
        self._most_bytes = min(table_bytes, budget_bytes) - delta_bytes  # limit of a table without its delta
        self.delta_bytes = delta_bytes
        self._floor = floor
        self._prompt_weight = prompt_weight
        self._merged_rows = merged_rows
        self._tables: dict[str, SoftNgramTable] = {}  # least recently used first
        self._asked: dict[int, _Asked] = {}
        warm_up()

    def remember(self, rows: VerifiedRows) -> None:
        token_ids, probs = rows.token_ids[:, : self.num_successors], rows.probs[:, : self.num_successors]
        is_prompt = bool((probs[:, :1] == 1.0).all() and not probs[:, 1:].any())
        weight = self._prompt_weight if is_prompt else 1.0
        if weight > 0.0:
            table = self._table(rows.namespace)
            table.learn(rows.contexts, token_ids, probs, weight, for_export=rows.may_share)
            self._grow(table)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Credit the contexts whose drafts were accepted, so that they are evicted last."""
        for outcome in outcomes:
            asked = self._asked.get(outcome.seq_id)
            table = self._tables.get(asked.namespace) if asked is not None else None
            if asked is not None and table is not None and outcome.num_accepted > 0:
                accepted = outcome.emitted[: outcome.num_accepted]
                table.credit(np.concatenate([asked.last_tokens, accepted]), len(accepted))

    def forget(self, seq_id: int) -> None:
        self._asked.pop(seq_id, None)

    def memory_bytes(self) -> int:
        """Bytes allocated for tables. The operating system backs only touched pages."""
        return sum(table.memory_bytes for table in self._tables.values())

    @property
    def namespaces(self) -> list[str]:
        """Namespaces with a table, the least recently used first."""
        return list(self._tables)

    def table_of(self, namespace: str) -> SoftNgramTable | None:
        """The namespace's table, if there is one. Does not update LRU order."""
        return self._tables.get(namespace)

    def merge_entries(self, namespace: str, entries: Entries) -> None:
        """Merge counts of another replica. Does not update LRU order, except for a new table."""
        table = self._tables.get(namespace)
        if table is None:
            table = self._table(namespace)
        table.merge_entries(at_most(entries, self._merged_rows))
        self._grow(table)

    def drop_namespace(self, namespace: str) -> None:
        """Drop the namespace's table."""
        self._tables.pop(namespace, None)

    def _propose_one(self, context: DraftContext) -> DraftTree:
        if context.namespace not in self._tables or (self.delta_bytes and not context.reads_cache):
            return DraftTree.empty()  # shared tables are part of the shared cache
        last = np.array(context.tokens[-self.order :], np.int32)
        token_ids, parents, confidence = self._table(context.namespace).draft(last, context.max_nodes, self._floor)
        if not len(token_ids):
            return DraftTree.empty()
        self._asked[context.seq_id] = _Asked(context.namespace, last)
        return DraftTree(token_ids, parents, confidence)

    def _table(self, namespace: str) -> SoftNgramTable:
        """The namespace's table, which becomes the most recently used."""
        table = self._tables.pop(namespace, None)
        if table is None:
            first_bytes = self._most_bytes
            while first_bytes >= 2 * _FIRST_BYTES:
                first_bytes //= 2
            table = SoftNgramTable(first_bytes + self.delta_bytes, self.order, delta_bytes=self.delta_bytes)
            self._tables[namespace] = table
            self._make_room()
        self._tables[namespace] = table
        return table

    def _grow(self, table: SoftNgramTable) -> None:
        """Double the table when half of its slots are filled, before buckets overflow."""
        is_full = 2 * len(table) > table.num_slots and 2 * table.num_slots * SLOT_BYTES <= self._most_bytes
        if is_full and not table.is_growing:
            table.grow()
            self._make_room()
            if self.memory_bytes() > self._budget_bytes:  # no room for the old and the new size
                table.finish_growth()

    def _make_room(self) -> None:
        """Drop tables until the others are within the budget: the least recently used of the largest owner, never the
        most recently used."""
        while len(self._tables) > 1 and self.memory_bytes() > self._budget_bytes:
            del self._tables[first_to_give_way(list(self._tables), lambda name: self._tables[name].memory_bytes)]
