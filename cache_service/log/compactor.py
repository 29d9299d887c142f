"""Folds the log of a namespace into segments, one compactor at a time: see `fenced_fold`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import msgspec

from cache_service.errors import FormatError, StoreError
from cache_service.formats.documents import Piece, assemble, split_pieces
from cache_service.formats.entry_codec import decode_entry
from cache_service.formats.frame import FrameCodec
from cache_service.formats.manifest import (
    MAX_MANIFEST_SEGMENTS,
    Generation,
    Manifest,
    SegmentEntry,
    decode_manifest,
    encode_manifest,
    entry_of,
)
from cache_service.formats.segment import MAX_SEGMENT_PIECES, decode_segment, encode_segment
from cache_service.log.fenced_fold import FencedCompactor, Fold, FoldCounters, FoldSettings
from cache_service.log.fold_plan import FoldLimits, after_fold, num_absorbed
from cache_service.log.second_chance import survivors
from cache_service.store.store import Store, StoredManifest
from cache_service.store.turns import Turns

log = logging.getLogger(__name__)

_SURVIVORS_SHARE = 4  # of a generation, at most a part in so many outlives it


@dataclass(frozen=True, slots=True)
class CompactorSettings(FoldSettings):
    """How tokens are folded. Raises SettingError."""

    limits: FoldLimits = field(default_factory=FoldLimits)
    _: KW_ONLY
    lease_s: float = 30.0
    fold_entries: int = 4096
    fold_every_s: float = 10.0


@dataclass(slots=True)
class CompactorCounters(FoldCounters):
    """Since the start."""

    lost_segments: int = 0  # that were to be written anew and could not be read
    dropped_generations: int = 0
    survived_tokens: int = 0  # that were carried over from those


class Compactor(FencedCompactor[Manifest]):
    """Compacts the tokens of one namespace. Not thread-safe."""

    def __init__(
        self,
        store: Store,
        codec: FrameCodec,
        settings: CompactorSettings | None = None,
        clock: Callable[[], float] = time.time,
        limits: Callable[[bool], FoldLimits] | None = None,
    ) -> None:
        """limits: the budgets of the next fold, in the place of the settings'; given whether there is something to
        fold, and may raise StoreError."""
        super().__init__(store)
        self.counters: CompactorCounters = CompactorCounters()
        self._settings: CompactorSettings = settings or CompactorSettings()
        self._codec = codec
        self._clock = clock
        self._limits = limits or (lambda has_new: self._settings.limits)

    def prepare(self) -> Fold[Manifest] | None:
        token = self._lease()
        if token is None:
            return None
        epoch = self._store.begin_epoch(self._settings.keep_s)
        now_s = int(self._clock())
        old = self._manifest(self._store.read_manifest(), epoch, now_s)
        if old is None:
            self.release()
            return None
        entries = self._unfolded(old)
        if entries is None:
            return None
        num_entries, pieces = self._decode(entries)
        if num_entries == 0 and entries:
            self.release()
            return None
        limits = self._limits(num_entries > 0)
        if num_entries == 0 and sum(generation.num_bytes for generation in old.generations) <= limits.max_bytes:
            return None
        written = self._write_segments(old.open_generation, pieces, token, epoch)
        if written is None:
            self._refused("lease or data set are others by now")
            return None
        kept, added = written
        generations = self._with_survivors(
            after_fold(old.generations, [*kept, *added], now_s, limits), old, limits, token, epoch
        )
        if generations is None:
            self._refused("lease or data set are others by now")
            return None
        new = Manifest(
            epoch=epoch,
            version=old.version + 1,
            fencing_token=token,
            generations=generations,
            folded_id=entries[num_entries - 1][0] if num_entries else old.folded_id,
            folded_generation=old.open_generation.number,
        )
        live, before = ([entry.digest for _, entry in manifest.segments] for manifest in (new, old))
        return self._prepared(new, encode_manifest(self._codec, new), old, live, before, num_entries)

    def commit(self, fold: Fold[Manifest]) -> bool:
        is_done = super().commit(fold)
        if is_done:
            self.counters.dropped_generations += fold.manifest.oldest_generation - fold.replaces.oldest_generation
        return is_done

    def _manifest(self, stored: StoredManifest, epoch: str, now_s: int) -> Manifest | None:
        """The manifest there is, or an empty one that readers of a lost one can tell from it. None: it is not ours."""
        if stored.frame is not None and stored.epoch == epoch:
            try:
                manifest = decode_manifest(self._codec, stored.frame)
                if manifest.epoch == epoch and manifest.version == stored.version:
                    return manifest
            except FormatError as error:
                if error.reason == "newer":
                    self._leave("the manifest", error)
                    return None
                log.warning("the manifest of %s is replaced: %s", self._store.keys.namespace, error)
        # No generation's number exceeds the version of its manifest, so this one is new to every reader.
        number = stored.version + 1 if stored.version else 0
        return Manifest(epoch, stored.version, 0, (Generation(number, now_s),))

    def _decode(self, entries: list[tuple[str, bytes]]) -> tuple[int, list[Piece]]:
        """How many entries are to be folded, and their pieces."""
        pieces: list[Piece] = []
        for row, (_, frame) in enumerate(entries):
            try:
                pieces += decode_entry(self._codec, frame)
            except FormatError as error:
                if error.reason == "newer":
                    self._leave("the log", error)
                    return row, pieces
                log.debug("an entry of %s is left out: %s", self._store.keys.namespace, error)
                self.counters.corrupt_entries += 1
        return len(entries), pieces

    def _write_segments(
        self, generation: Generation, pieces: list[Piece], token: int, epoch: str
    ) -> tuple[list[SegmentEntry], list[SegmentEntry]] | None:
        """Segments of the open generation that stay as they are, and those that hold `pieces`. None: Redis refused one,
        because somebody has taken the lease, or ended the epoch to purge it."""
        limits, segments = self._settings.limits, list(generation.segments)
        if not pieces:
            return segments, []
        num_tokens = sum(len(piece.token_ids) for piece in pieces)
        num_kept = len(segments) - num_absorbed(segments, num_tokens, limits.segment_tokens)
        before = [piece for entry in segments[num_kept:] for piece in self._read_segment(entry)]
        added = self._write(assemble(before + pieces), token, epoch)
        return None if added is None else (segments[:num_kept], added)

    def _with_survivors(
        self, generations: tuple[Generation, ...], old: Manifest, limits: FoldLimits, token: int, epoch: str
    ) -> tuple[Generation, ...] | None:
        """The generations, and in the open one what outlives those that go. None: Redis refused a segment."""
        gone = [each for each in old.generations if each.number < generations[0].number]
        room = min(limits.generation_tokens, sum(each.num_tokens for each in gone)) // _SURVIVORS_SHARE
        pieces = (piece for each in gone for entry in each.segments for piece in self._read_segment(entry))
        found = survivors(pieces, room)
        if not found:
            return generations
        added = self._write(found, token, epoch)
        if added is None:
            return None
        opened = generations[-1]
        result = (*generations[:-1], msgspec.structs.replace(opened, segments=(*opened.segments, *added)))
        num_bytes = sum(each.num_bytes for each in result)
        if num_bytes > limits.max_bytes or sum(len(each.segments) for each in result) > MAX_MANIFEST_SEGMENTS:
            return generations  # what was written for nothing expires
        self.counters.survived_tokens += sum(entry.num_tokens for entry in added)
        return result

    def _write(self, pieces: list[Piece], token: int, epoch: str) -> list[SegmentEntry] | None:
        """Segments that hold the pieces. None: Redis refused one."""
        added = []
        for batch in split_pieces(pieces, self._settings.limits.segment_tokens, MAX_SEGMENT_PIECES):
            segment = encode_segment(self._codec, batch)
            keep_s = self._settings.keep_s
            if not self._store.write_segment(segment.digest, segment.frame, keep_s, token, epoch):
                return None
            added.append(entry_of(segment))
        return added

    def _read_segment(self, entry: SegmentEntry) -> list[Piece]:
        frame = self._store.read_segment(entry.digest, entry.num_bytes)
        try:
            if frame is not None:
                return decode_segment(self._codec, entry.digest, frame)
        except FormatError as error:
            log.warning("a segment of %s is left out: %s", self._store.keys.namespace, error)
        self.counters.lost_segments += 1
        return []


class CompactorThread:
    """Compacts namespaces again and again in one background thread. No method raises for a fault of the store."""

    def __init__(
        self, open_namespace: Callable[[str], tuple[Store, FrameCodec]], settings: CompactorSettings | None = None
    ) -> None:
        self._open_namespace = open_namespace
        self._settings = settings or CompactorSettings()
        self._turns = Turns("cache-compactor")

    def compact(self, namespace: str, limits: Callable[[bool], FoldLimits] | None = None) -> Compactor:
        """Begin to compact a namespace. The compactor is for looking at: its counters. limits: as a
        `Compactor` has them."""
        store, codec = self._open_namespace(namespace)
        compactor = Compactor(store, codec, self._settings, limits=limits)

        def turn() -> float:
            try:
                return 0.0 if compactor.fold() else self._settings.fold_every_s
            except StoreError as error:
                log.debug("namespace %s cannot be compacted for now: %s", namespace, error)
                compactor.counters.failures += 1
                return self._settings.fold_every_s

        self._turns.add(namespace, turn)
        return compactor

    def forget(self, namespace: str) -> None:
        """Compact it no more; its lease runs out by itself."""
        self._turns.remove(namespace)

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the thread; False if it still waits for Redis after `timeout_s`. Its leases run out by themselves."""
        return self._turns.close(timeout_s)
