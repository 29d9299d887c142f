"""The sequences of a worker, updated by deltas. Used by target and draft engines."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import NamedTuple, TypeVar

import numpy as np

from actors.engine.block_pool import BlockPool
from actors.engine.kv_cache import KvCache
from actors.engine.round_items import ITEM, NEW, READY, STALE, STARVED, apply_deltas, judge_deltas
from actors.engine.sequence import Sequence
from actors.messages import DraftItem, SequenceDelta, SequenceStart, VerifyItem, no_tokens

_Item = TypeVar("_Item", VerifyItem, DraftItem)


def distinct(items: Sequences[_Item]) -> list[_Item]:
    """The first item of each sequence: a round computes a sequence once."""
    first: dict[int, _Item] = {}
    for item in items:
        first.setdefault(item.delta.seq_id, item)
    return list(first.values())


class TakenIn(NamedTuple):
    """The sequences of a round after their deltas."""

    sequences: list[Sequence | None]
    rows: np.ndarray  # ITEM, of each sequence


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
        """Apply the deltas of a round and reserve room for its rows. num_nodes: of the draft tree of each item."""
        deltas = [item.delta for item in items]
        sequences = [
            self._sequences.get(delta.seq_id) if delta.start else self.find(delta, item.begin)
            for delta, item in zip(deltas, items, strict=True)
        ]
        rows = self._bring_up_to_date(sequences, deltas, [item.max_rows for item in items], num_nodes)
        return TakenIn(sequences, rows)

    def bring_up_to_date(self, sequence: Sequence, delta: SequenceDelta, max_rows: int) -> bool:
        """Apply the delta to the sequence that `find` has found, and reserve room for up to max_rows of its uncomputed
        tokens. Returns False and changes nothing if there is no room."""
        rows = self._bring_up_to_date([sequence], [delta], [max_rows], [0])
        return bool(rows["status"][0] == READY)

    def _bring_up_to_date(
        self,
        sequences: Sequences[Sequence | None],
        deltas: Sequences[SequenceDelta],
        max_rows: Sequences[int],
        num_nodes: Sequences[int],
    ) -> np.ndarray:
        """ITEM [deltas]. Forgets the sequences of stale ones."""
        told = [
            (0 if sequence is None else sequence.address, delta.start, len(delta.token_ids), max(1, most), nodes)
            for sequence, delta, most, nodes in zip(sequences, deltas, max_rows, num_nodes, strict=True)
        ]
        numbers = np.empty((len(told), len(ITEM.names or ())), np.int64)
        numbers[:, :5] = np.array(told, np.int64).reshape(-1, 5)
        rows: np.ndarray = numbers.view(ITEM)[:, 0]
        tokens = np.concatenate([no_tokens(), *[delta.token_ids for delta in deltas]], dtype=np.int32)
        accepted, moves = np.empty(len(tokens), np.int32), np.empty((2, len(tokens)), np.int64)
        if not judge_deltas(rows, tokens, accepted):
            for index in np.flatnonzero(rows["status"]).tolist():
                self._make_ready(sequences[index], deltas[index], rows[index])
        num_moves, num_full = apply_deltas(rows, tokens, accepted, moves)
        if num_moves and self._kv.num_slots:
            self._kv.move(moves[:, :num_moves])
        if num_full:
            self.publish(sequences, rows)
        return rows

    def _make_ready(self, sequence: Sequence | None, delta: SequenceDelta, row: np.void) -> None:
        """Let the sequence have what it lacks. Without room, or if it is stale, its status says so."""
        if row["status"] == STALE or sequence is None:
            self.forget(delta.seq_id)
            return
        max_rows, num_nodes = int(row["max_rows"]), int(row["num_nodes"])
        is_new = row["status"] == NEW
        if is_new:
            sequence.extend(delta.token_ids)
            sequence.reuse_prefix()
            known, count = sequence.length, min(sequence.num_pending, max_rows)
            is_last = count == sequence.num_pending
        else:
            known, count, is_last = sequence.length + len(delta.token_ids), int(row["count"]), bool(row["is_last"])
        if not sequence.reserve(sequence.num_computed + count):
            row["status"] = STARVED
            if is_new:
                sequence.free()
            return
        if is_last:
            sequence.reserve_most(known + num_nodes)
        sequence.make_room(known - sequence.length, num_nodes)
        self._sequences[delta.seq_id] = sequence
        row["status"] = READY

    def publish(self, sequences: Sequences[Sequence | None], rows: np.ndarray) -> None:
        """Share the full blocks of ready sequences. rows: ITEM, of the sequences."""
        for index in np.flatnonzero(rows["has_full_blocks"]).tolist():
            sequence = sequences[index]
            assert sequence is not None
            sequence.publish()

    def forget(self, seq_id: int) -> None:
        """Free a sequence's blocks. Unknown ids are ignored."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            sequence.free()

    def clear(self) -> None:
        for seq_id in list(self._sequences):
            self.forget(seq_id)
