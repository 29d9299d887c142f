"""Folds the log of a namespace into segments, one compactor at a time.

A lease says which of several compactors works; it is advice. What keeps the data whole is the write of the manifest:
Redis refuses it unless the writer's lease is still the newest that was granted, the data set is the one it read, and
the manifest is the one it replaces. Segments are named by their content and written before the manifest that mentions
them, so a compactor may stop anywhere, for any time, and do no harm.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cache_service.documents import Piece, assemble, split_pieces
from cache_service.entry_codec import decode_entry
from cache_service.errors import FormatError, StoreError
from cache_service.fold_plan import FoldLimits, after_fold, num_absorbed
from cache_service.frame import FrameCodec
from cache_service.manifest import Generation, Manifest, SegmentEntry, decode_manifest, encode_manifest, entry_of
from cache_service.segment import MAX_SEGMENT_PIECES, decode_segment, encode_segment
from cache_service.setting_bounds import require_bounds
from cache_service.store import KEEP_S, Store, StoredManifest
from cache_service.stream_id import START
from cache_service.turns import Turns

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompactorSettings:
    """How a compactor works. Raises SettingError."""

    limits: FoldLimits = field(default_factory=FoldLimits)
    lease_s: float = 30.0
    fold_entries: int = 4096  # of the log, at most, in a fold
    keep_s: int = KEEP_S  # that a namespace lives after its last fold
    retire_s: int = 600  # that a segment stays for readers of the manifest before
    fold_every_s: float = 10.0

    def __post_init__(self) -> None:
        require_bounds(
            self,
            lease_s=(0.01, 3600),
            fold_entries=(1, 65_536),
            keep_s=(1, 2**31),
            retire_s=(1, 2**31),
            fold_every_s=(0.01, 3600),
        )


@dataclass(slots=True)
class CompactorCounters:
    """Since the start."""

    folds: int = 0
    folded_entries: int = 0
    corrupt_entries: int = 0
    lost_segments: int = 0  # that were to be written anew and could not be read
    trimmed_entries: int = 0
    dropped_generations: int = 0
    left_folds: int = 0  # because manifest or log are of a later format or key
    refused_folds: int = 0  # by a newer lease, data set or manifest
    failures: int = 0  # Redis was unavailable or refused


@dataclass(frozen=True, slots=True)
class Fold:
    """A fold that is prepared: its segments are written, its manifest is not."""

    manifest: Manifest
    frame: bytes
    replaces: int  # version of the manifest that it was made from
    keep_from: str  # first id of the log that stays
    retired: tuple[str, ...]  # digests that the new manifest no longer mentions
    num_entries: int
    num_dropped: int  # generations
    has_more: bool  # the log goes on after what was folded


class Compactor:
    """Compacts one namespace. Not thread-safe."""

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
        self.counters = CompactorCounters()
        self._store = store
        self._codec = codec
        self._settings = settings or CompactorSettings()
        self._clock = clock
        self._limits = limits or (lambda has_new: self._settings.limits)
        self._owner = secrets.token_hex(16)

    def fold(self) -> bool:
        """Fold once, if this compactor may and there is something. True if there is more. Raises StoreError."""
        fold = self.prepare()
        return fold is not None and self.commit(fold) and fold.has_more

    def prepare(self) -> Fold | None:
        """Read the log and write the segments of its next part. None: another one compacts, or nothing is to be done.

        Raises StoreError.
        """
        token = self._store.acquire_lease(
            self._owner, max(1, int(self._settings.lease_s * 1000)), self._settings.keep_s
        )
        if token is None:
            return None
        epoch = self._store.begin_epoch(self._settings.keep_s)
        stored = self._store.read_manifest()
        now_s = int(self._clock())
        old = self._manifest(stored, epoch, now_s)
        if old is None:
            self.release()  # renewed turn after turn, the lease would keep out those that can read it
            return None
        view = self._store.read_log(old.folded_id, self._settings.fold_entries + 1)
        if view.epoch != epoch or view.version != stored.version:
            return None  # somebody else is at work
        entries = view.entries
        if entries and entries[0][0] == old.folded_id:
            entries = entries[1:]
        num_entries, pieces = self._decode(entries)
        if num_entries == 0 and entries:
            self.release()  # as above
            return None
        limits = self._limits(num_entries > 0)
        if num_entries == 0 and sum(generation.num_bytes for generation in old.generations) <= limits.max_bytes:
            return None
        written = self._write_segments(old.open_generation, pieces, token, epoch)
        if written is None:
            self._refused("lease or data set are others by now")
            return None
        kept, added = written
        generations = after_fold(old.generations, [*kept, *added], now_s, limits)
        new = Manifest(
            epoch=epoch,
            version=stored.version + 1,
            fencing_token=token,
            generations=generations,
            folded_id=entries[num_entries - 1][0] if num_entries else old.folded_id,
            folded_generation=old.open_generation.number,
        )
        live = {entry.digest for _, entry in new.segments}
        return Fold(
            manifest=new,
            frame=encode_manifest(self._codec, new),
            replaces=stored.version,
            keep_from=old.folded_id,
            retired=tuple(entry.digest for _, entry in old.segments if entry.digest not in live),
            num_entries=num_entries,
            num_dropped=generations[0].number - old.oldest_generation,
            has_more=num_entries >= self._settings.fold_entries,
        )

    def commit(self, fold: Fold) -> bool:
        """Make a prepared fold the truth. False if Redis refused it: then nothing has changed. Raises StoreError."""
        new = fold.manifest
        verdict = self._store.write_manifest(
            fold.frame, new.fencing_token, new.epoch, fold.replaces, new.version, new.folded_id, self._settings.keep_s
        )
        if verdict != "ok":
            self._refused(verdict)
            return False
        self.counters.folds += 1
        self.counters.folded_entries += fold.num_entries
        self.counters.dropped_generations += fold.num_dropped
        # Up to where the fold before this one ended: a reader of that manifest still finds its place in the log.
        if fold.keep_from != START:
            self.counters.trimmed_entries += self._store.trim_log(new.version, fold.keep_from)
        self._store.keep_live_segments([entry.digest for _, entry in new.segments], self._settings.keep_s)
        self._store.keep_segments(fold.retired, self._settings.retire_s)
        return True

    def release(self) -> None:
        """Let another compactor take over at once. Raises StoreError."""
        self._store.release_lease(self._owner)

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

    def _refused(self, reason: str) -> None:
        log.info("a fold of namespace %s was refused: %s", self._store.keys.namespace, reason)
        self.counters.refused_folds += 1

    def _leave(self, what: str, error: FormatError) -> None:
        """To compactors that can read it: in an upgrade or a change of keys, others know more than this one."""
        if self.counters.left_folds == 0:
            log.warning("%s of %s is left to others: %s", what, self._store.keys.namespace, error)
        self.counters.left_folds += 1

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
        added = []
        for batch in split_pieces(assemble(before + pieces), limits.segment_tokens, MAX_SEGMENT_PIECES):
            segment = encode_segment(self._codec, batch)
            keep_s = self._settings.keep_s
            if not self._store.write_segment(segment.digest, segment.frame, keep_s, token, epoch):
                return None
            added.append(entry_of(segment))
        return segments[:num_kept], added

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
