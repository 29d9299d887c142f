"""All that a namespace holds at one moment, read once: for administrators, who may wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cache_service.formats.documents import Piece, assemble
from cache_service.formats.frame import FrameCodec
from cache_service.log.log_reader import LogReader, ReaderCounters, ReaderSettings
from cache_service.store.store import Store

Progress = Callable[[str, int, int], None]  # (what is being done, units done, units in all)

_SETTINGS = ReaderSettings(warm_tokens=2**40, warm_deadline_s=3600.0, read_entries=256)


def silent(stage: str, done: int, total: int) -> None:
    """A progress callback that shows nothing."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Documents in as few pieces as possible, each token once, oldest first; and what the reader met on its way."""

    pieces: list[Piece]
    counters: ReaderCounters

    @property
    def unread(self) -> int:
        """Entries, segments and manifests that are damaged, missing, or of another key."""
        read = self.counters
        return read.corrupt_entries + read.corrupt_segments + read.missing_segments + read.corrupt_manifests


class _Listener:
    """Keeps the pieces that are told, by generation."""

    def __init__(self) -> None:
        self.generations: dict[int, list[Piece]] = {}

    def reset(self) -> None:
        self.generations.clear()

    def pieces(self, generation: int, pieces: list[Piece]) -> None:
        # Views of a body that holds nothing else: copying them would save nothing.
        self.generations.setdefault(generation, []).extend(pieces)

    def expire(self, oldest_generation: int) -> None:
        for generation in [number for number in self.generations if number < oldest_generation]:
            del self.generations[generation]


def read_contents(store: Store, codec: FrameCodec, progress: Progress = silent) -> Contents:
    """Read all of it; what cannot be read is left out and counted. Raises StoreError."""
    listener = _Listener()
    reader = LogReader(store, codec, listener, _SETTINGS)
    while reader.step():
        progress("reading the cache", round(100 * reader.warm_ratio), 100)
    pieces = [piece for number in sorted(listener.generations) for piece in listener.generations[number]]
    return Contents(assemble(pieces), reader.counters)
