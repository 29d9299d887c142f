"""Reading the soft n-gram counts of one namespace: see `folded_log_reader`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cache_service.counts.soft_codec import Delta, SoftManifest, SoftPart, area_of, soft_payload
from cache_service.counts.soft_ngram import Entries
from cache_service.formats.frame import FrameCodec
from cache_service.log.folded_log_reader import FoldedLogCounters, FoldedLogReader, LogSource, Place, ResetReason
from cache_service.store.store import KEEP_S, Store, StoredManifest

READ_ENTRIES = 8
"""Entries of the log read at once; each has up to a megabyte."""


class SoftListener(Protocol):
    """Adds counts to a table. Called from one thread."""

    def counts(self, entries: Entries) -> None: ...

    def reset(self) -> None:
        """Forget everything, including what was learnt in this process."""


@dataclass(slots=True)
class SoftReaderCounters(FoldedLogCounters):
    """Counts since the start; `entries` are those of other origins and this data set."""

    contexts: int = 0


class SoftReader(FoldedLogReader[SoftManifest, SoftPart, Delta, Entries]):
    """Reads one namespace and order for one listener, in steps. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        codec: FrameCodec,
        order: int,
        listener: SoftListener,
        *,
        origin: bytes,
        keep_s: int = KEEP_S,
        source: LogSource | None = None,
    ) -> None:
        """store: the namespace's, any area; origin: its deltas are left out; keep_s: time to live of an epoch that the
        reader begins; source: as in `FoldedLogReader`, for the area."""
        super().__init__(store.beside(area_of(order)), codec, soft_payload(order), READ_ENTRIES, source)
        self.counters: SoftReaderCounters = SoftReaderCounters()
        self.origin = origin
        self._listener = listener
        self._keep_s = keep_s

    def _start(self, stored: StoredManifest) -> Place[SoftManifest, SoftPart] | None:
        if stored.epoch is None:
            # What is learnt from now on belongs to this epoch, so that a purge is noticed.
            self.store.begin_epoch(self._keep_s)
            return None
        return super()._start(stored)

    def _begin(self, manifest: SoftManifest | None) -> Sequence[SoftPart]:
        return () if manifest is None else manifest.segments

    def _deliver_segment(self, ref: SoftPart, segment: Entries) -> None:
        self._deliver(segment)

    def _deliver_entry(self, place: Place[SoftManifest, SoftPart], entry_id: str, entry: Delta) -> None:
        if entry.epoch != place.epoch:
            return  # learnt for another data set
        if entry.origin == self.origin:
            self._has_delivered = True  # the next start would count it twice
        else:
            self.counters.entries += 1
            self._deliver(entry.entries)

    def _deliver_reset(self) -> None:
        self._listener.reset()

    def _restart(self, reason: ResetReason) -> None:
        # With another epoch, local counts are dropped, too: they may have been purged.
        self._has_delivered = self._has_delivered or reason in ("epoch", "went back")
        super()._restart(reason)

    def _deliver(self, entries: Entries) -> None:
        self._has_delivered = True
        self.counters.contexts += len(entries.keys)
        if len(entries.keys):
            self._listener.counts(entries)
