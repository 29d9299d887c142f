"""The sequences of a worker, updated by deltas. Used by target and draft engines."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import TypeVar

from actors.engine.block_pool import BlockPool
from actors.engine.kv_cache import KvCache
from actors.engine.sequence import Sequence, accepted_paths
from actors.messages import DraftItem, SequenceDelta, SequenceStart, VerifyItem

_Item = TypeVar("_Item", VerifyItem, DraftItem)


def distinct(items: Sequences[_Item]) -> list[_Item]:
    """The first item of each sequence: a round computes a sequence once."""
    first: dict[int, _Item] = {}
    for item in items:
        first.setdefault(item.delta.seq_id, item)
    return list(first.values())


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

    def accepted_paths(self, items: Sequences[VerifyItem]) -> list[list[int]]:
        """For each item, what its delta accepts of its sequence's last tree."""
        deltas = [item.delta for item in items]
        return accepted_paths([self._sequences.get(delta.seq_id) for delta in deltas], [d.token_ids for d in deltas])

    def bring_up_to_date(
        self, sequence: Sequence, delta: SequenceDelta, max_rows: int, path: list[int] | None = None
    ) -> bool:
        """Apply the delta and reserve room for up to max_rows of its uncomputed tokens. path: what the delta accepts of
        the last tree, if that is known.

        Returns False and changes nothing if there is no room.
        """
        if delta.start > 0:
            new = len(delta.token_ids)
            if not sequence.reserve(min(sequence.length + new, sequence.num_computed + new + max_rows)):
                return False
            if path is None:
                (path,) = accepted_paths([sequence], [delta.token_ids])
            sequence.apply(delta, path, self._kv)
            sequence.publish()
            return True
        sequence.extend(delta.token_ids)
        sequence.reuse_prefix()
        if not sequence.reserve(min(sequence.length, sequence.num_computed + max_rows)):
            sequence.free()
            return False
        self._sequences[delta.seq_id] = sequence
        return True

    def forget(self, seq_id: int) -> None:
        """Free a sequence's blocks. Unknown ids are ignored."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            sequence.free()

    def clear(self) -> None:
        for seq_id in list(self._sequences):
            self.forget(seq_id)
