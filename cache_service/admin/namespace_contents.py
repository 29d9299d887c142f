"""Reads the whole contents of a namespace once, for administrators."""

from __future__ import annotations

from dataclasses import dataclass

from cache_service.formats.documents import Piece, assemble
from cache_service.formats.frame import FrameCodec
from cache_service.formats.manifest import Manifest
from cache_service.formats.piece_codec import PieceColumns
from cache_service.formats.segment import SegmentEntry
from cache_service.log.log_reader import LogReader, ReaderSettings
from cache_service.store.store import Store

_SETTINGS = ReaderSettings(warm_tokens=2**40, warm_deadline_s=3600.0, read_entries=256)


@dataclass(frozen=True, slots=True)
class Contents:
    pieces: list[Piece]  # assembled documents, oldest first
    unread: int  # as `FoldedLogCounters` counts


class _Listener:
    def __init__(self) -> None:
        self.pieces: list[Piece] = []  # not copied: the buffers of their views hold nothing else

    def begin(self, manifest: Manifest | None, segments: list[SegmentEntry]) -> bool:
        return True

    def segment(self, entry: SegmentEntry, columns: PieceColumns) -> None:
        self.pieces += columns.pieces()

    def segments_told(self) -> None:
        pass

    def entry(self, entry_id: str, pieces: list[Piece]) -> None:
        self.pieces += pieces

    def renew(self, manifest: Manifest) -> None:
        pass

    def reset(self) -> None:
        self.pieces.clear()


def read_contents(store: Store, codec: FrameCodec) -> Contents:
    """Read a namespace; what cannot be read is counted and left out. Raises StoreError."""
    listener = _Listener()
    reader = LogReader(store, codec, listener, _SETTINGS)
    while reader.step():
        pass
    return Contents(assemble(listener.pieces), reader.counters.unread)
