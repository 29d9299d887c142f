"""How one namespace is read: manifest, then segments, then the log, and from the start again when that makes no sense.

The reader keeps the id of the last entry it has read and asks for the log from that entry on, that one included: if it
comes first in the answer, nothing between has been lost. If it is gone, the log was trimmed past the reader, or the
data are not the ones it knew. A fold trims the log only up to where the fold before it ended, so a reader that has
taken the newest manifest finds its place in the log for as long as a fold interval.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from cache_service.errors import FormatError
from cache_service.formats.documents import Piece
from cache_service.formats.entry_codec import decode_entry
from cache_service.formats.frame import FrameCodec
from cache_service.formats.manifest import Manifest, SegmentEntry, decode_manifest
from cache_service.formats.piece_codec import PieceColumns
from cache_service.formats.segment import decode_segment_columns
from cache_service.formats.stream_id import START, parse_id
from cache_service.setting_bounds import require_bounds
from cache_service.store.store import LogView, Store

log = logging.getLogger(__name__)

ResetReason = Literal["epoch", "went back", "gap", "moved on", "generation"]


class Listener(Protocol):
    """Who wants to know what a namespace holds. Called from one thread; what it raises is logged and counted."""

    def reset(self) -> None:
        """Forget everything: what comes next is all there is."""

    def pieces(self, generation: int, pieces: list[Piece]) -> None:
        """More pieces of a generation. Some may have been told before. Copy the token_ids you keep: they are views."""

    def expire(self, oldest_generation: int) -> None:
        """Forget the generations before this one."""


@runtime_checkable
class SegmentListener(Protocol):
    """Who wants to know from which segments and entries pieces come. Otherwise as a Listener."""

    def begin(self, manifest: Manifest | None, segments: list[tuple[int, SegmentEntry]]) -> bool:
        """A start: the manifest, and those of its segments that are to be read, oldest first, each with its generation.
        False: do not read them. What they and the log after them hold is all there is."""

    def segment(self, entry: SegmentEntry, columns: PieceColumns) -> None:
        """One of the segments. Those that are lost, damaged or too late are not told."""

    def segments_told(self) -> None:
        """All of them have been told that will be. Not after a begin that did not want them."""

    def entry(self, entry_id: str, pieces: list[Piece]) -> None:
        """An entry of the log. Copy the token_ids you keep: they are views."""

    def renew(self, manifest: Manifest) -> None:
        """There is a newer manifest; what is new in its segments has been told as entries."""

    def reset(self) -> None:
        """Forget everything; another start follows. Not told where nothing has been."""


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """Bounds of reading. Raises SettingError."""

    warm_tokens: int = 16 * 2**20  # of the newest segments that are read at a start; 0: the log alone
    warm_deadline_s: float = 30.0  # what has not been read by then is left out
    read_entries: int = 64  # of the log, at once

    def __post_init__(self) -> None:
        require_bounds(self, warm_tokens=(0, 2**40), warm_deadline_s=(0, 3600), read_entries=(1, 4096))


@dataclass(slots=True)
class ReaderCounters:
    """Since the start."""

    entries: int = 0
    entry_tokens: int = 0
    corrupt_entries: int = 0
    segments: int = 0
    segment_tokens: int = 0
    corrupt_segments: int = 0
    missing_segments: int = 0
    skipped_segments: int = 0  # past the deadline of a warm start
    corrupt_manifests: int = 0
    lost_log: int = 0  # starts at which the log no longer reached back to the segments
    resets: int = 0
    listener_faults: int = 0


@dataclass(slots=True)
class _Place:
    """Where the reader stands."""

    epoch: str | None
    version: int  # of the manifest that it knows
    manifest: Manifest | None
    segments: deque[tuple[int, SegmentEntry]]  # still to be read
    num_segments: int
    deadline: float
    cursor: str  # the last entry that is known
    is_anchored: bool = False  # the cursor's entry has been in the log
    has_caught_up: bool = False  # with the log, once


@dataclass(slots=True)
class LogReader:
    """Reads one namespace for one listener, in steps. Not thread-safe."""

    store: Store
    codec: FrameCodec
    listener: Listener | SegmentListener
    settings: ReaderSettings = field(default_factory=ReaderSettings)
    clock: Callable[[], float] = time.monotonic
    counters: ReaderCounters = field(default_factory=ReaderCounters)
    _place: _Place | None = None
    _read_at: float | None = None  # when Redis last answered
    _has_delivered: bool = False

    def step(self) -> bool:
        """One question to Redis and what follows from it; True if there is more to read at once. Raises StoreError."""
        has_more = self._step()
        self._read_at = self.clock()
        return has_more

    def _step(self) -> bool:
        if self._place is None:
            self._place = self._begin()
            return True
        if self._place.segments:
            self._read_segment(self._place)
            if not self._place.segments and isinstance(self.listener, SegmentListener):
                self._tell(self.listener.segments_told)
            return True
        return self._read_log(self._place)

    @property
    def warm_ratio(self) -> float:
        """Share of the segments of this start that have been dealt with, 0 to 1."""
        place = self._place
        if place is None:
            return 0.0
        return 1.0 - len(place.segments) / place.num_segments if place.num_segments else 1.0

    @property
    def lag_s(self) -> float:
        """Seconds since Redis last answered; 0 if it never has."""
        return 0.0 if self._read_at is None else self.clock() - self._read_at

    @property
    def has_caught_up(self) -> bool:
        """Whether everything has been told, since this start, that there was at some moment."""
        place = self._place
        return place is not None and place.has_caught_up

    def _begin(self) -> _Place:
        stored = self.store.read_manifest()
        manifest = self._decode_manifest(stored.frame, stored.epoch)
        segments = newest_segments(manifest, self.settings.warm_tokens) if manifest is not None else []
        if isinstance(self.listener, SegmentListener):
            self._has_delivered = manifest is not None
            if not self._ask_begin(self.listener, manifest, segments):
                segments = []
        return _Place(
            epoch=stored.epoch,
            version=stored.version,
            manifest=manifest,
            segments=deque(segments),
            num_segments=len(segments),
            deadline=self.clock() + self.settings.warm_deadline_s,
            cursor=manifest.folded_id if manifest is not None else START,
        )

    def _ask_begin(
        self, listener: SegmentListener, manifest: Manifest | None, segments: list[tuple[int, SegmentEntry]]
    ) -> bool:
        wanted: list[bool] = []
        self._tell(lambda: wanted.append(listener.begin(manifest, segments)))
        return all(wanted)

    def _decode_manifest(self, frame: bytes | None, epoch: str | None) -> Manifest | None:
        if frame is None:
            return None
        try:
            manifest = decode_manifest(self.codec, frame)
        except FormatError as error:
            log.warning("the manifest of %s cannot be used: %s", self.store.keys.namespace, error)
            self.counters.corrupt_manifests += 1
            return None
        return manifest if manifest.epoch == epoch else None

    def _read_segment(self, place: _Place) -> None:
        if self.clock() > place.deadline:
            self.counters.skipped_segments += len(place.segments)
            place.segments.clear()
            return
        generation, entry = place.segments[0]
        frame = self.store.read_segment(entry.digest, entry.num_bytes)
        place.segments.popleft()  # only now: a fault of the store leaves it to the next step
        if frame is None:
            self.counters.missing_segments += 1
            return
        try:
            columns = decode_segment_columns(self.codec, entry.digest, frame)
        except FormatError as error:
            log.warning("a segment of %s is left out: %s", self.store.keys.namespace, error)
            self.counters.corrupt_segments += 1
            return
        self.counters.segments += 1
        self.counters.segment_tokens += entry.num_tokens
        listener = self.listener
        if isinstance(listener, SegmentListener):
            self._tell(lambda: listener.segment(entry, columns))
        else:
            self._deliver(listener, generation, columns.pieces())

    def _read_log(self, place: _Place) -> bool:
        view = self.store.read_log(place.cursor, self.settings.read_entries + 1)
        reason = reset_reason(place.epoch, place.version, place.cursor, place.is_anchored, view)
        if reason is None and view.version != place.version:
            reason = self._renew_manifest(place)
        if reason is not None:
            self._restart(reason)
            return True
        entries = view.after(place.cursor)
        if len(entries) < len(view.entries):
            place.is_anchored = True
        elif not place.is_anchored and place.cursor != START and entries:
            self.counters.lost_log += 1
        for entry_id, frame in entries:
            place.cursor, place.is_anchored = entry_id, True
            self._read_entry(place.manifest, entry_id, frame)
        has_more = len(entries) >= self.settings.read_entries
        place.has_caught_up = place.has_caught_up or not has_more
        return has_more

    def _read_entry(self, manifest: Manifest | None, entry_id: str, frame: bytes) -> None:
        try:
            pieces = decode_entry(self.codec, frame)
        except FormatError as error:
            log.debug("an entry of %s is left out: %s", self.store.keys.namespace, error)
            self.counters.corrupt_entries += 1
            return
        self.counters.entries += 1
        self.counters.entry_tokens += sum(len(piece.token_ids) for piece in pieces)
        listener = self.listener
        if isinstance(listener, SegmentListener):
            self._has_delivered = True
            self._tell(lambda: listener.entry(entry_id, pieces))
        else:
            self._deliver(listener, generation_of(manifest, entry_id), pieces)

    def _renew_manifest(self, place: _Place) -> ResetReason | None:
        """Take over a newer manifest: which generations there are. Its segments hold what the log has told, and what
        outlives generations that went: only those who look at segments take that over at once."""
        stored = self.store.read_manifest()
        if stored.epoch != place.epoch:
            return "epoch"
        manifest, known = self._decode_manifest(stored.frame, stored.epoch), place.manifest
        place.version = stored.version
        if manifest is None:
            return None
        place.manifest = manifest
        newest = known.open_generation.number if known is not None else 0
        if manifest.oldest_generation > newest:
            return "generation"
        listener = self.listener
        if isinstance(listener, SegmentListener):
            self._tell(lambda: listener.renew(manifest))
        elif manifest.oldest_generation > (known.oldest_generation if known is not None else 0):
            self._tell(lambda: listener.expire(manifest.oldest_generation))
        return None

    def _restart(self, reason: ResetReason) -> None:
        log.info("namespace %s is read from the start: %s", self.store.keys.namespace, reason)
        self._place = None
        if self._has_delivered:
            self._has_delivered = False
            self.counters.resets += 1
            self._tell(self.listener.reset)

    def _deliver(self, listener: Listener, generation: int, pieces: list[Piece]) -> None:
        self._has_delivered = True
        self._tell(lambda: listener.pieces(generation, pieces))

    def _tell(self, message: Callable[[], None]) -> None:
        try:
            message()
        except Exception:
            log.exception("a listener of namespace %s failed", self.store.keys.namespace)
            self.counters.listener_faults += 1


def newest_segments(manifest: Manifest, max_tokens: int) -> list[tuple[int, SegmentEntry]]:
    """As many of the newest segments as hold `max_tokens` together, oldest first, each with its generation."""
    chosen: list[tuple[int, SegmentEntry]] = []
    for generation, entry in reversed(manifest.segments):
        max_tokens -= entry.num_tokens
        if max_tokens < 0:
            break
        chosen.append((generation, entry))
    return chosen[::-1]


def generation_of(manifest: Manifest | None, entry_id: str) -> int:
    """Where an entry of the log has been folded, or will be."""
    if manifest is None:
        return 0
    if parse_id(entry_id) <= parse_id(manifest.folded_id):
        return manifest.folded_generation
    return manifest.open_generation.number


def reset_reason(epoch: str | None, version: int, cursor: str, is_anchored: bool, view: LogView) -> ResetReason | None:
    """Why a reader that knows these must begin again, or None.

    view: the log from `cursor` on. Data of another epoch are other data; a version that went back means old data;
    without its anchor a reader has missed something, or stands in the future of restored data; and before it had one, a
    new manifest may have taken away what it has not read.
    """
    if view.epoch != epoch:
        return "epoch"
    if view.version < version:
        return "went back"
    if view.entries and view.entries[0][0] == cursor:
        return None
    if is_anchored:
        return "gap"
    return "moved on" if view.version != version else None
