"""How the soft n-gram counts of one namespace are read: manifest, parts, then the log, as `log_reader` reads tokens."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from cache_service.counts.soft_codec import area_of, decode_delta, decode_part
from cache_service.counts.soft_manifest import SoftPart, decode_soft_manifest
from cache_service.counts.soft_ngram import Entries
from cache_service.errors import FormatError
from cache_service.formats.frame import FrameCodec
from cache_service.formats.stream_id import START
from cache_service.log.log_reader import ResetReason, reset_reason
from cache_service.store.store import KEEP_S, Store

log = logging.getLogger(__name__)

_READ_ENTRIES = 8  # of the log, at once; each up to a megabyte


class SoftListener(Protocol):
    """Who adds the counts up. Called from one thread."""

    def counts(self, entries: Entries) -> None:
        """Add these."""

    def reset(self) -> None:
        """Forget everything, also what was learnt here: what comes next is all there is."""


@dataclass(slots=True)
class SoftReaderCounters:
    """Since the start."""

    entries: int = 0
    own_entries: int = 0
    corrupt_entries: int = 0
    foreign_entries: int = 0  # of another data set
    contexts: int = 0
    parts: int = 0
    lost_parts: int = 0
    corrupt_manifests: int = 0
    resets: int = 0


@dataclass(slots=True)
class _Place:
    """Where the reader stands."""

    epoch: str
    version: int  # of the manifest that it knows
    parts: deque[SoftPart]  # still to be read
    num_parts: int
    cursor: str  # the last entry that is known
    is_anchored: bool = False  # the cursor's entry has been in the log


@dataclass(slots=True)
class SoftReader:
    """Reads one namespace and order for one listener, in steps. Not thread-safe."""

    store: Store  # of the namespace, any area of it
    codec: FrameCodec
    order: int
    listener: SoftListener
    origin: bytes  # whose deltas are left out
    keep_s: int = KEEP_S  # that a data set lives which reading has begun
    counters: SoftReaderCounters = field(default_factory=SoftReaderCounters)
    _place: _Place | None = None
    _has_told: bool = False

    def __post_init__(self) -> None:
        self.store = self.store.beside(area_of(self.order))

    def step(self) -> bool:
        """One question to Redis and what follows from it; True if there is more to read at once. Raises StoreError."""
        if self._place is None:
            self._place = self._begin()
            return self._place is not None
        if self._place.parts:
            self._read_part(self._place)
            return True
        return self._read_log(self._place)

    @property
    def epoch(self) -> str | None:
        """Of the data set that is being read; None before that is known."""
        return self._place.epoch if self._place is not None else None

    @property
    def warm_ratio(self) -> float:
        """Share of the parts of this start that have been dealt with, 0 to 1."""
        place = self._place
        if place is None:
            return 0.0
        return 1.0 - len(place.parts) / place.num_parts if place.num_parts else 1.0

    def _begin(self) -> _Place | None:
        stored = self.store.read_manifest()
        if stored.epoch is None:
            # What is learnt from now on belongs to this data set: should it be purged, that is seen.
            self.store.begin_epoch(self.keep_s)
            return None
        parts: deque[SoftPart] = deque()
        folded_id = START
        if stored.frame is not None:
            try:
                manifest = decode_soft_manifest(self.codec, stored.frame)
                if manifest.epoch == stored.epoch:
                    parts, folded_id = deque(manifest.parts), manifest.folded_id
            except FormatError as error:
                log.warning("the soft manifest of %s cannot be used: %s", self.store.keys.namespace, error)
                self.counters.corrupt_manifests += 1
        return _Place(stored.epoch, stored.version, parts, len(parts), folded_id)

    def _read_part(self, place: _Place) -> None:
        part = place.parts[0]
        frame = self.store.read_segment(part.digest, part.num_bytes)
        place.parts.popleft()  # only now: a fault of the store leaves it to the next step
        try:
            if frame is not None:
                entries = decode_part(self.codec, self.order, part.digest, frame)
                self.counters.parts += 1
                self._deliver(entries)
                return
        except FormatError as error:
            log.warning("a part of %s is left out: %s", self.store.keys.namespace, error)
        self.counters.lost_parts += 1

    def _read_log(self, place: _Place) -> bool:
        view = self.store.read_log(place.cursor, _READ_ENTRIES + 1)
        reason = reset_reason(place.epoch, place.version, place.cursor, place.is_anchored, view)
        if reason is not None:
            self._restart(place, reason)
            return True
        place.version = view.version
        entries = view.after(place.cursor)
        place.is_anchored = place.is_anchored or len(entries) < len(view.entries)
        for entry_id, frame in entries:
            place.cursor, place.is_anchored = entry_id, True
            self._read_entry(place, frame)
        return len(entries) >= _READ_ENTRIES

    def _read_entry(self, place: _Place, frame: bytes) -> None:
        try:
            delta = decode_delta(self.codec, self.order, frame)
        except FormatError as error:
            log.debug("soft counts of %s are left out: %s", self.store.keys.namespace, error)
            self.counters.corrupt_entries += 1
            return
        if delta.epoch != place.epoch:
            self.counters.foreign_entries += 1
        elif delta.origin == self.origin:
            self.counters.own_entries += 1
            self._has_told = True  # of what the next start would count twice
        else:
            self.counters.entries += 1
            self._deliver(delta.entries)

    def _restart(self, place: _Place, reason: ResetReason) -> None:
        log.info("soft counts of %s are read from the start: %s", self.store.keys.namespace, reason)
        self._place = None
        # Of another data set, even what was learnt here is forgotten: somebody may have purged it.
        is_other = reason in ("epoch", "went back")
        if is_other or self._has_told:
            self._has_told = False
            self.counters.resets += 1
            self.listener.reset()

    def _deliver(self, entries: Entries) -> None:
        self._has_told = True
        self.counters.contexts += len(entries.keys)
        if len(entries.keys):
            self.listener.counts(entries)
