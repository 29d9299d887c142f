"""Reading the tokens of one namespace: see `folded_log_reader`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import Field

from cache_service.formats.documents import Piece
from cache_service.formats.frame import FrameCodec
from cache_service.formats.manifest import Manifest
from cache_service.formats.piece_codec import PieceColumns
from cache_service.formats.segment import SegmentEntry
from cache_service.log.folded_log_reader import FoldedLogCounters, FoldedLogReader, LogSource, Place, ResetReason
from cache_service.log.payload import TOKENS
from cache_service.options import Options
from cache_service.store.store import Store

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Receives the contents of a namespace. Called from one thread; its exceptions are logged."""

    def begin(self, manifest: Manifest | None, segments: list[SegmentEntry]) -> bool:
        """A start. segments: those to be read, oldest first. False: skip them."""

    def segment(self, entry: SegmentEntry, columns: PieceColumns) -> None:
        """One segment. Lost, damaged and late segments are left out."""

    def segments_told(self) -> None:
        """All segments have been delivered. Not called after `begin` returned False."""

    def entry(self, entry_id: str, pieces: list[Piece]) -> None:
        """A log entry. token_ids of the pieces are views: copy what you keep."""

    def renew(self, manifest: Manifest) -> None:
        """There is a newer manifest, whose new contents have been delivered as entries."""

    def reset(self) -> None:
        """Forget everything; another start follows. Not called if nothing was delivered."""


class ReaderSettings(Options):
    """Limits of reading."""

    # Tokens of the newest segments to read at a start; 0: read only the log.
    warm_tokens: Annotated[int, Field(ge=0, le=2**40)] = 16 * 2**20
    warm_deadline_s: Annotated[float, Field(ge=0, le=3600)] = 30.0  # later segments are skipped
    read_entries: Annotated[int, Field(ge=1, le=4096)] = 64  # log entries per read


@dataclass(slots=True)
class ReaderCounters(FoldedLogCounters):
    skipped_segments: int = 0  # past warm_deadline_s


class LogReader(FoldedLogReader[Manifest, SegmentEntry, list[Piece], PieceColumns]):
    """Reads one namespace for one listener, in steps. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        codec: FrameCodec,
        listener: Listener,
        settings: ReaderSettings | None = None,
        source: LogSource | None = None,
    ) -> None:
        self._settings = settings or ReaderSettings()
        super().__init__(store, codec, TOKENS, self._settings.read_entries, source)
        self.counters: ReaderCounters = ReaderCounters()
        self._listener = listener
        self._deadline = 0.0  # for this start's segments
        self._read_at: float | None = None  # when Redis last answered

    def step(self) -> bool:
        has_more = super().step()
        self._read_at = time.monotonic()
        return has_more

    @property
    def lag_s(self) -> float:
        """Seconds since all was known to be read, or Redis last answered; 0 if it never has."""
        current_at = None if self._source is None else self._source.current_at
        read_at = self._read_at if current_at is None else current_at
        return 0.0 if read_at is None else time.monotonic() - read_at

    def _begin(self, manifest: Manifest | None) -> list[SegmentEntry]:
        self._deadline = time.monotonic() + self._settings.warm_deadline_s
        segments = newest_segments(manifest, self._settings.warm_tokens) if manifest is not None else []
        self._has_delivered = manifest is not None
        wanted: list[bool] = []
        self._tell(lambda: wanted.append(self._listener.begin(manifest, segments)))
        return segments if all(wanted) else []

    def _read_segment(self, place: Place[Manifest, SegmentEntry]) -> None:
        if time.monotonic() > self._deadline:
            self.counters.skipped_segments += len(place.segments)
            place.segments.clear()
        else:
            super()._read_segment(place)
        if not place.segments:
            self._tell(self._listener.segments_told)

    def _deliver_segment(self, ref: SegmentEntry, segment: PieceColumns) -> None:
        self._tell(lambda: self._listener.segment(ref, segment))

    def _deliver_entry(self, place: Place[Manifest, SegmentEntry], entry_id: str, entry: list[Piece]) -> None:
        self.counters.entries += 1
        self._has_delivered = True
        self._tell(lambda: self._listener.entry(entry_id, entry))

    def _deliver_reset(self) -> None:
        self._tell(self._listener.reset)

    def _renew(self, place: Place[Manifest, SegmentEntry], version: int) -> ResetReason | None:
        """Take over the new manifest, unless even its oldest generation is newer than what was read."""
        stored = self.store.read_manifest()
        if stored.epoch != place.epoch:
            return "epoch"
        manifest, known = self._decode_manifest(stored), place.manifest
        place.version = stored.version
        if manifest is None:
            return None
        place.manifest = manifest
        if manifest.oldest_generation > (known.open_generation.number if known is not None else 0):
            return "generation"
        self._tell(lambda: self._listener.renew(manifest))
        return None

    def _tell(self, message: Callable[[], None]) -> None:
        try:
            message()
        except Exception:
            log.exception("a listener of namespace %s failed", self.store.keys.namespace)


def newest_segments(manifest: Manifest, max_tokens: int) -> list[SegmentEntry]:
    """The newest segments with at most `max_tokens` in all, oldest first."""
    chosen: list[SegmentEntry] = []
    for entry in reversed(manifest.segments):
        max_tokens -= entry.num_tokens
        if max_tokens < 0:
            break
        chosen.append(entry)
    return chosen[::-1]
