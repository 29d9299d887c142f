"""Reading a folded log: manifest, then segments, then the stream; from the start again when needed.

The reader asks for the log from the last entry it has read, inclusive. If that entry comes first in the answer, nothing
was lost in between; if it is gone, the log was trimmed past the reader, or the data set is another one. A fold trims
the log only up to the end of the previous fold, so the reader of a manifest finds its position for one more fold.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol

from cache_service.errors import FormatError
from cache_service.formats.frame import FrameCodec
from cache_service.formats.stream_id import START
from cache_service.log.payload import EntryT, ManifestT, Payload, RefT, SegmentT
from cache_service.store.store import LogView, Store, StoredManifest

log = logging.getLogger(__name__)

ResetReason = Literal["epoch", "went back", "gap", "moved on", "generation"]


@dataclass(slots=True)
class FoldedLogCounters:
    """Counts since the start."""

    entries: int = 0
    corrupt_entries: int = 0
    segments: int = 0
    corrupt_segments: int = 0
    missing_segments: int = 0
    corrupt_manifests: int = 0
    resets: int = 0

    @property
    def unread(self) -> int:
        """Entries, segments and manifests that are damaged, missing, or encrypted with another key."""
        return self.corrupt_entries + self.corrupt_segments + self.missing_segments + self.corrupt_manifests


@dataclass(slots=True)
class Place(Generic[ManifestT, RefT]):
    """A reader's position."""

    epoch: str | None
    version: int  # the manifest's
    cursor: str  # id of the last entry read
    manifest: ManifestT | None = None
    segments: deque[RefT] = field(default_factory=deque)  # still to be read
    num_segments: int = 0  # to read at this start
    is_anchored: bool = False  # the cursor's entry was seen in the log
    has_caught_up: bool = False  # the end of the log was reached once


class LogSource(Protocol):
    """A log that is read without asking the store each time: see `log_feed`."""

    def read_log(self, place: Place[Any, Any], max_entries: int) -> LogView:
        """As `Store.read_log` from the cursor of the reader's place. Raises StoreError."""

    @property
    def is_current(self) -> bool:
        """Whether what was read last was all there is."""

    @property
    def current_at(self) -> float | None:
        """Monotonic seconds at which that was last known; None: it is not known to be all."""


class FoldedLogReader(ABC, Generic[ManifestT, RefT, EntryT, SegmentT]):
    """Reads one log in steps. Not thread-safe."""

    counters: FoldedLogCounters

    def __init__(
        self,
        store: Store,
        codec: FrameCodec,
        payload: Payload[ManifestT, RefT, EntryT, SegmentT],
        read_entries: int,
        source: LogSource | None = None,
    ) -> None:
        """read_entries: log entries per read. source: where the log is read; None: in the store."""
        self.store = store
        self._source = source
        self._codec = codec
        self._payload = payload
        self._read_entries = read_entries
        self._place: Place[ManifestT, RefT] | None = None
        self._has_delivered = False  # whether the listener holds anything

    @abstractmethod
    def _begin(self, manifest: ManifestT | None) -> Sequence[RefT]:
        """Start reading. Returns the segments to read, oldest first."""

    @abstractmethod
    def _deliver_segment(self, ref: RefT, segment: SegmentT) -> None: ...

    @abstractmethod
    def _deliver_entry(self, place: Place[ManifestT, RefT], entry_id: str, entry: EntryT) -> None: ...

    @abstractmethod
    def _deliver_reset(self) -> None:
        """Make the listener forget everything."""

    def step(self) -> bool:
        """Read from Redis once. True if there is more to read at once. Raises StoreError."""
        if self._place is None:
            self._place = self._start(self.store.read_manifest())
            return self._place is not None
        if self._place.segments:
            self._read_segment(self._place)
            return True
        return self._read_log(self._place)

    @property
    def is_current(self) -> bool:
        """Whether there is nothing to read until the source says so."""
        return self._place is not None and self._source is not None and self._source.is_current

    @property
    def epoch(self) -> str | None:
        """The epoch being read; None if not yet known."""
        return self._place.epoch if self._place is not None else None

    @property
    def warm_ratio(self) -> float:
        """Share of this start's segments that have been processed, 0 to 1."""
        place = self._place
        if place is None:
            return 0.0
        return 1.0 - len(place.segments) / place.num_segments if place.num_segments else 1.0

    @property
    def has_caught_up(self) -> bool:
        """Whether the end of the log has been reached since this start."""
        place = self._place
        return place is not None and place.has_caught_up

    def _start(self, stored: StoredManifest) -> Place[ManifestT, RefT] | None:
        """None if there is nothing to read yet."""
        manifest = self._decode_manifest(stored)
        segments = deque(self._begin(manifest))
        cursor = START if manifest is None else manifest.folded_id
        return Place(stored.epoch, stored.version, cursor, manifest, segments=segments, num_segments=len(segments))

    def _decode_manifest(self, stored: StoredManifest) -> ManifestT | None:
        if stored.frame is None:
            return None
        try:
            manifest = self._payload.manifest.decode(self._codec, stored.frame)
        except FormatError as error:
            log.warning("the manifest of %s cannot be used: %s", self.store.keys, error)
            self.counters.corrupt_manifests += 1
            return None
        return manifest if manifest.epoch == stored.epoch else None

    def _read_segment(self, place: Place[ManifestT, RefT]) -> None:
        ref = place.segments[0]
        frame = self.store.read_segment(ref.digest, ref.num_bytes)
        place.segments.popleft()  # only now, so that it is retried after a fault of the store
        if frame is None:
            self.counters.missing_segments += 1
            return
        try:
            segment = self._payload.decode_segment(self._codec, ref.digest, frame)
        except FormatError as error:
            log.warning("a segment of %s is left out: %s", self.store.keys, error)
            self.counters.corrupt_segments += 1
            return
        self.counters.segments += 1
        self._deliver_segment(ref, segment)

    def _read_log(self, place: Place[ManifestT, RefT]) -> bool:
        max_entries = self._read_entries + 1
        if self._source is None:
            view = self.store.read_log(place.cursor, max_entries)
        else:
            view = self._source.read_log(place, max_entries)
        reason = reset_reason(place, view)
        if reason is None and view.version != place.version:
            reason = self._renew(place, view.version)
        if reason is not None:
            self._restart(reason)
            return True
        entries = view.after(place.cursor)
        if len(entries) < len(view.entries):
            place.is_anchored = True
        for entry_id, frame in entries:
            place.cursor, place.is_anchored = entry_id, True
            self._read_entry(place, entry_id, frame)
        has_more = len(entries) >= self._read_entries
        place.has_caught_up = place.has_caught_up or not has_more
        return has_more

    def _read_entry(self, place: Place[ManifestT, RefT], entry_id: str, frame: bytes) -> None:
        try:
            entry = self._payload.decode_entry(self._codec, frame)
        except FormatError as error:
            log.debug("an entry of %s is left out: %s", self.store.keys, error)
            self.counters.corrupt_entries += 1
            return
        self._deliver_entry(place, entry_id, entry)

    def _renew(self, place: Place[ManifestT, RefT], version: int) -> ResetReason | None:
        """Take over a newer manifest, whose segments hold entries already read. Returns why to restart, or None."""
        place.version = version
        return None

    def _restart(self, reason: ResetReason) -> None:
        log.info("%s is read from the start: %s", self.store.keys, reason)
        self._place = None
        if self._has_delivered:
            self._has_delivered = False
            self.counters.resets += 1
            self._deliver_reset()


def reset_reason(known: Place[ManifestT, RefT], view: LogView) -> ResetReason | None:
    """Why a reader at this position must start again, or None.

    view: the log from the cursor on. "epoch": another data set; "went back": an older manifest was restored; "gap": the
    cursor's entry has disappeared, so entries were missed or older data restored; "moved on": the manifest changed
    before the cursor's entry was seen, so unread entries may have been folded.
    """
    if view.epoch != known.epoch:
        return "epoch"
    if view.version < known.version:
        return "went back"
    if view.entries and view.entries[0][0] == known.cursor:
        return None
    if known.is_anchored:
        return "gap"
    return "moved on" if view.version != known.version else None
