"""Folds deltas of soft n-gram counts into parts: see `fenced_fold`."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from cache_service.counts.soft_codec import (
    MAX_PART_CONTEXTS,
    Delta,
    SoftManifest,
    SoftPart,
    area_of,
    encode_part,
    soft_payload,
)
from cache_service.counts.soft_ngram import MIN_BYTES, SLOT_BYTES, Entries, SoftNgramTable
from cache_service.formats.frame import FrameCodec
from cache_service.log.fenced_fold import FencedCompactor, FoldCounters, Folding, FoldSeconds, FoldSettings, Lease
from cache_service.log.fold_plan import num_absorbed
from cache_service.store.store import Store


class SoftCompactorSettings(FoldSettings):
    # Contexts that a namespace keeps in Redis; each takes 60 bytes before compression.
    max_contexts: Annotated[int, Field(ge=64, le=2**26)] = 2**18
    lease_s: FoldSeconds = 60.0
    fold_entries: Annotated[int, Field(ge=1, le=4096)] = 16
    fold_every_s: FoldSeconds = 15.0


class SoftCompactor(FencedCompactor[SoftManifest, SoftPart, Delta, Entries]):
    """Compacts the soft counts of one namespace and order. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        codec: FrameCodec,
        order: int,
        settings: SoftCompactorSettings | None = None,
        folding: Folding | None = None,
    ) -> None:
        """store: the namespace's, any area; order: the tables'. folding: as in `FencedCompactor`."""
        super().__init__(store.beside(area_of(order)), codec, soft_payload(order), folding=folding)
        self.counters = FoldCounters()
        self._settings: SoftCompactorSettings = settings or SoftCompactorSettings()
        self._order = order

    def _empty_manifest(self, epoch: str, version: int) -> SoftManifest:
        return SoftManifest(epoch, version, 0)

    def _fold(self, old: SoftManifest, entries: list[Delta], folded_id: str, lease: Lease) -> SoftManifest | None:
        if folded_id == old.folded_id:
            return None
        deltas = [delta.entries for delta in entries if delta.epoch == lease.epoch]
        return SoftManifest(
            epoch=old.epoch,
            version=old.version + 1,
            fencing_token=lease.token,
            folded_id=folded_id,
            parts=self._with_deltas(old.parts, deltas, lease),
        )

    def _with_deltas(self, parts: tuple[SoftPart, ...], deltas: list[Entries], lease: Lease) -> tuple[SoftPart, ...]:
        """The parts with the deltas added; the last small ones are rewritten. Beyond max_contexts, all are rewritten
        without the least used contexts."""
        num_new = sum(len(delta.keys) for delta in deltas)
        if not num_new:
            return parts
        sizes = [part.num_contexts for part in parts]
        is_over = sum(sizes) + num_new > self._settings.max_contexts
        num_kept = 0 if is_over else len(parts) - num_absorbed(sizes, num_new)
        before = [entries for part in parts[num_kept:] if (entries := self._read_segment(part)) is not None]
        merged = self._merge([*before, *deltas], is_over)
        rows = [slice(begin, begin + MAX_PART_CONTEXTS) for begin in range(0, len(merged.keys), MAX_PART_CONTEXTS)]
        encoded = [encode_part(self._codec, self._order, merged.rows(some)) for some in rows]
        return (*parts[:num_kept], *(self._write_segment(part, frame, lease) for part, frame in encoded))

    def _merge(self, summands: list[Entries], is_over: bool) -> Entries:
        """The sum. Beyond max_contexts, a quarter less is kept, so that not every fold has to evict."""
        slots = 2 * sum(len(entries.keys) for entries in summands)  # half full, to avoid evictions
        if is_over:
            slots = self._settings.max_contexts * 3 // 4
        table = SoftNgramTable(max(slots * SLOT_BYTES, MIN_BYTES), self._order)
        for entries in summands:
            table.merge_entries(entries)
        merged = table.entries()
        return merged.rows(np.argsort(merged.keys))  # so that parts do not depend on the table's size
