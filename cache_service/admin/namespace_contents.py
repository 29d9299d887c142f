"""Reads the whole contents of a namespace once, for administrators."""

from __future__ import annotations

from dataclasses import dataclass

from cache_service.formats.documents import Piece, assemble
from cache_service.formats.frame import FrameCodec
from cache_service.log.log_reader import LogReader, ReaderCounters, ReaderSettings
from cache_service.store.store import Store

_SETTINGS = ReaderSettings(warm_tokens=2**40, warm_deadline_s=3600.0, read_entries=256)


@dataclass(frozen=True, slots=True)
class Contents:
    """Assembled documents, oldest first, and the reader's counters."""

    pieces: list[Piece]
    counters: ReaderCounters

    @property
    def unread(self) -> int:
        """Entries, segments and manifests that are damaged, missing, or encrypted with another key."""
        read = self.counters
        return read.corrupt_entries + read.corrupt_segments + read.missing_segments + read.corrupt_manifests


class _Listener:
    def __init__(self) -> None:
        self.generations: dict[int, list[Piece]] = {}

    def reset(self) -> None:
        self.generations.clear()

    def pieces(self, generation: int, pieces: list[Piece]) -> None:
        # Not copied: the views' buffers hold nothing else.
        self.generations.setdefault(generation, []).extend(pieces)

    def expire(self, oldest_generation: int) -> None:
        for generation in [number for number in self.generations if number < oldest_generation]:
            del self.generations[generation]


def read_contents(store: Store, codec: FrameCodec) -> Contents:
    """Read a namespace; what cannot be read is counted and left out. Raises StoreError."""
    listener = _Listener()
    reader = LogReader(store, codec, listener, _SETTINGS)
    while reader.step():
        pass
    pieces = [piece for number in sorted(listener.generations) for piece in listener.generations[number]]
    return Contents(assemble(pieces), reader.counters)
