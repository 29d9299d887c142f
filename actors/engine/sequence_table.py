"""The sequences of a worker, updated by deltas. Used by target and draft engines."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import NamedTuple, TypeVar

import numpy as np

from actors.engine.block_pool import BlockPool
from actors.engine.kv_cache import KvCache
from actors.engine.round_items import ITEM, NEW, NUM_TOLD, READY, STALE, STARVED, apply_deltas, judge_deltas
from actors.engine.sequence import Sequence
from actors.messages import DraftItem, SequenceDelta, SequenceStart, VerifyItem

_Item = TypeVar("_Item", VerifyItem, DraftItem)


def distinct(items: Sequences[_Item]) -> list[_Item]:
    """The first item of each sequence: a round computes a sequence once."""
    first: dict[int, _Item] = {}
    for item in items:
        first.setdefault(item.delta.seq_id, item)
    return list(first.values())


def items_of(told: Sequences[tuple[int, ...]]) -> np.ndarray:
    """ITEM [S] with the first NUM_TOLD fields of each."""
    numbers = np.empty((len(told), len(ITEM.names or ())), np.int64)
    numbers[:, :NUM_TOLD] = told
    items: np.ndarray = numbers.view(ITEM)[:, 0]
    return items


class TakenIn(NamedTuple):
    """The sequences of a round after their deltas."""

    sequences: Sequences[Sequence | None]
    items: np.ndarray  # ITEM, of each sequence
    num_ready: int
    num_emitting: int  # ready ones whose known tokens are all computed then
    num_nodes: int  # draft nodes of ready ones, as far as there is room


class SequenceTable:
    """Sequences by id, each with its blocks in one pool."""

    def __init__(self, pool: BlockPool, kv: KvCache, sequence_type: type[Sequence] = Sequence) -> None:
        self._pool = pool
        self._sequence_type = sequence_type
        self._kv = kv
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, seq_id: int) -> Sequence | None:
        return self._sequences.get(seq_id)

    def begin_of(self, item: VerifyItem | DraftItem) -> SequenceStart | None:
        """The item's SequenceStart, sent now or before; None for an unknown sequence."""
        if item.delta.start == 0:
            return item.begin
        sequence = self._sequences.get(item.delta.seq_id)
        return None if sequence is None else sequence.begin

    def find(self, delta: SequenceDelta, begin: SequenceStart | None) -> Sequence | None:
        """The sequence before this delta, a new one for start == 0, or None if the delta is stale.

        A delta is stale if the sequence is unknown, has another length, or has nothing left to compute. The last
        happens when the answer of a round was lost: logits are not kept.
        """
        sequence = self._sequences.get(delta.seq_id)
        if delta.start == 0:
            self.forget(delta.seq_id)
            if begin is None or len(delta.token_ids) == 0:
                return None
            return self._sequence_type(delta.seq_id, begin, self._pool)
        if sequence is None or sequence.length != delta.start or not (len(delta.token_ids) or sequence.num_pending):
            self.forget(delta.seq_id)
            return None
        return sequence

    def take_in(self, items: Sequences[VerifyItem], num_nodes: Sequences[int]) -> TakenIn:
        """Apply the deltas of a round and reserve room for its rows. num_nodes: of the draft tree of each item. At
        least one item."""
        deltas = [item.delta for item in items]
        sequences = [
            self._sequences.get(delta.seq_id) if delta.start else self.find(delta, item.begin)
            for delta, item in zip(deltas, items, strict=True)
        ]
        told = [
            (0 if sequence is None else sequence.address, delta.start, len(delta.token_ids), item.max_rows, nodes)
            for sequence, delta, item, nodes in zip(sequences, deltas, items, num_nodes, strict=True)
        ]
        tokens = np.concatenate([delta.token_ids for delta in deltas], dtype=np.int32)
        return self.apply([delta.seq_id for delta in deltas], sequences, items_of(told), tokens)

    def bring_up_to_date(self, sequence: Sequence, delta: SequenceDelta, max_rows: int) -> bool:
        """Apply the delta to the sequence that `find` has found, and reserve room for up to max_rows of its uncomputed
        tokens. Returns False and changes nothing if there is no room."""
        told = [(sequence.address, delta.start, len(delta.token_ids), max_rows, 0)]
        tokens = np.array(delta.token_ids, np.int32)
        return self.apply([delta.seq_id], [sequence], items_of(told), tokens).num_ready == 1

    def apply(
        self, seq_ids: Sequences[int], sequences: Sequences[Sequence | None], items: np.ndarray, tokens: np.ndarray
    ) -> TakenIn:
        """Apply deltas to these sequences, and reserve room. items: ITEM, told by `items_of`; the rest is filled in.
        tokens: int32, those of all deltas. Forgets the sequences of stale ones."""
        accepted, moves = np.empty(len(tokens), np.int32), np.empty((2, len(tokens)), np.int64)
        if not judge_deltas(items, tokens, accepted):
            ends = items["num_tokens"].cumsum()
            for index in np.flatnonzero(items["status"]).tolist():
                item, end = items[index], int(ends[index])
                self._make_ready(seq_ids[index], sequences[index], tokens[end - int(item["num_tokens"]) : end], item)
        num_moves, num_full, *counts = apply_deltas(items, tokens, accepted, moves)
        if num_moves and self._kv.num_slots:
            self._kv.move(moves[:, :num_moves])
        if num_full:
            self.publish(sequences, items)
        return TakenIn(sequences, items, *counts)

    def _make_ready(self, seq_id: int, sequence: Sequence | None, token_ids: np.ndarray, item: np.void) -> None:
        """Let the sequence have what it lacks. Without room, or if it is stale, its status says so."""
        if item["status"] == STALE or sequence is None:
            self.forget(seq_id)
            return
        max_rows, num_nodes = int(item["max_rows"]), int(item["num_nodes"])
        is_new = item["status"] == NEW
        if is_new:
            sequence.extend(token_ids)
            if sequence.begin.num_prompt_logprobs < 0:  # else every row of the prompt is wanted
                sequence.reuse_prefix()
            known, count = sequence.length, min(sequence.num_pending, max_rows)
            is_last = count == sequence.num_pending
        else:
            known, count, is_last = sequence.length + len(token_ids), int(item["count"]), bool(item["is_last"])
        needed = sequence.num_computed + count
        if not sequence.reserve(known + num_nodes if is_last else needed):
            if not sequence.reserve(needed):
                item["status"] = STARVED
                if is_new:
                    sequence.free()
                return
            sequence.reserve_most(known + num_nodes)
        sequence.make_room(known - sequence.length, num_nodes)
        self._sequences[seq_id] = sequence
        item["status"] = READY

    def publish(self, sequences: Sequences[Sequence | None], items: np.ndarray) -> None:
        """Share the full blocks of ready sequences. items: ITEM, of the sequences."""
        for index in np.flatnonzero(items["has_full_blocks"]).tolist():
            sequence = sequences[index]
            assert sequence is not None
            sequence.publish()

    def forget(self, seq_id: int) -> None:
        """Free a sequence's blocks. Unknown ids are ignored."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            sequence.free()

    def clear(self) -> None:
        """Forget every sequence, and what blocks hold: they are published when their tokens are accepted, and a round
        that failed may not have copied the KV."""
        for sequence in self._sequences.values():
            sequence.drop()
        self._sequences.clear()
        self._kv.drop_moves()
        self._pool.clear()
