"""Folding a log into segments, safely with several compactors at once.

A lease decides which compactor works, but is only advisory. Consistency comes from the write of the manifest: Redis
refuses it unless the writer's lease is the newest one granted, the epoch is the one it read, and the manifest is the
one it replaces. Segments are content-addressed and written before the manifest that names them, so a compactor may
stop at any point. The log is trimmed only up to the end of the previous fold, so that a reader of the previous manifest
still finds its position in the log.
"""

from __future__ import annotations

import logging
import random
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, Generic
from weakref import WeakSet

from pydantic import Field

from cache_service.errors import FormatError, StoreError
from cache_service.formats.frame import FrameCodec
from cache_service.formats.stream_id import START
from cache_service.log.payload import EntryT, ManifestT, Payload, RefT, SegmentT
from cache_service.options import KeepSeconds, Options
from cache_service.store.store import KEEP_S, Store, StoredManifest

log = logging.getLogger(__name__)

# Turns without a fold, each of which doubles the time to the next. Who writes to a namespace folds it, so others need
# not look, unless it ends first.
_MOST_IDLE_TURNS = 5
_MOST_TURNS_BESIDE_ANOTHER = 3

# After a fold, where the process folds other namespaces, too. Others that write there ask within a few turns, so that
# all of them fold in the long run.
_RELEASE_PROBABILITY = 0.25

FoldSeconds = Annotated[float, Field(ge=0.01, le=3600)]
FoldEntries = Annotated[int, Field(ge=1, le=65_536)]


class FoldSettings(Options):
    """Settings of a compactor."""

    lease_s: FoldSeconds
    fold_entries: FoldEntries  # most log entries per fold
    keep_s: KeepSeconds = KEEP_S  # time to live of manifest and segments after their last fold
    retire_s: KeepSeconds = 600  # time to live of a replaced segment, for readers of the previous manifest
    fold_every_s: FoldSeconds


@dataclass(slots=True)
class FoldCounters:
    """Since the start."""

    folds: int = 0
    folded_entries: int = 0
    corrupt_entries: int = 0
    lost_segments: int = 0  # segments to be rewritten that could not be read
    trimmed_entries: int = 0
    left_folds: int = 0  # manifest or log has a later format or key
    failures: int = 0  # Redis was unavailable or refused


@dataclass(frozen=True, slots=True)
class Lease:
    """What Redis checks before it accepts a segment or a manifest."""

    token: int  # fencing token
    epoch: str  # when the manifest was read


@dataclass(frozen=True, slots=True)
class Fold(Generic[ManifestT]):
    """A prepared fold: its segments are written, its manifest is not."""

    manifest: ManifestT
    frame: bytes
    replaces: ManifestT
    num_entries: int
    has_more: bool  # the log has more entries to fold


class _FoldRefused(Exception):
    """Redis refused a segment: another process has taken the lease, or a purge has ended the epoch."""


class FencedCompactor(ABC, Generic[ManifestT, RefT, EntryT, SegmentT]):
    """Compacts one log of one namespace. Not thread-safe."""

    counters: FoldCounters
    _settings: FoldSettings

    def __init__(
        self,
        store: Store,
        codec: FrameCodec,
        payload: Payload[ManifestT, RefT, EntryT, SegmentT],
        may_rest: bool = True,
        folding: Folding | None = None,
    ) -> None:
        """may_rest: whether turns without a fold may come seldom. folding: the compactors of one thread whose last
        turn folded, shared by them."""
        self._store = store
        self._codec = codec
        self._payload = payload
        self._owner = secrets.token_hex(16)
        self._may_rest = may_rest
        self._folding = WeakSet() if folding is None else folding
        self._num_idle_turns = 0
        self._is_other_at_work = False  # another compactor held the lease when asked last

    @abstractmethod
    def _empty_manifest(self, epoch: str, version: int) -> ManifestT:
        """The manifest to start from; version: that of the lost one, 0 if there was none."""

    @abstractmethod
    def _fold(self, old: ManifestT, entries: list[EntryT], folded_id: str, lease: Lease) -> ManifestT | None:
        """Write segments for `entries` with `_write_segment`. Returns the manifest that replaces `old`; None if there
        is nothing to do. folded_id: the new manifest's last folded entry, old.folded_id if there are no new ones."""

    def turn(self) -> float:
        """Fold once. Returns the seconds until the next fold. Does not raise for a fault of the store.

        A namespace with nothing to fold is checked less and less often, and its lease expires. So is one that another
        compactor folds. A process that folds several gives one up now and then, for another process to take.
        """
        folds, has_more, is_released = self.counters.folds, False, False
        try:
            has_more = self.fold()
            is_released = self.counters.folds > folds and not has_more and self._release_sometimes()
        except (StoreError, FormatError) as error:
            log.debug("%s cannot be folded for now: %s", self._store.keys, error)
            self.counters.failures += 1
        if self.counters.folds > folds and not is_released:
            self._folding.add(self)
        else:
            self._folding.discard(self)
        if is_released:
            self._is_other_at_work, self._num_idle_turns = True, 1
            return self._settings.fold_every_s * 2
        is_idle = self._may_rest and self.counters.folds == folds
        most = _MOST_TURNS_BESIDE_ANOTHER if self._is_other_at_work else _MOST_IDLE_TURNS
        self._num_idle_turns = min(self._num_idle_turns + 1, most) if is_idle else 0
        return 0.0 if has_more else self._settings.fold_every_s * 2**self._num_idle_turns

    @property
    def rests(self) -> bool:
        """Whether its turns come seldom, since there was nothing to fold: `wake` it when there is."""
        return self._num_idle_turns > 0 and not self._is_other_at_work

    def wake(self) -> None:
        self._num_idle_turns = 0

    def fold(self) -> bool:
        """Fold once, if the lease is free and there is something to fold. True if there is more. Raises StoreError."""
        fold = self.prepare()
        return fold is not None and self.commit(fold) and fold.has_more

    def prepare(self) -> Fold[ManifestT] | None:
        """Read the next part of the log and write its segments. None: another compactor works, or there is nothing to
        do. Raises StoreError."""
        token = self._acquire_lease()
        if token is None:
            return None
        stored = self._store.read_manifest()
        if stored.epoch is None:  # expired meanwhile
            return None
        old = self._current_manifest(stored, stored.epoch)
        if old is None:
            self.release()
            return None
        view = self._store.read_log(old.folded_id, self._settings.fold_entries + 1)
        if (view.epoch, view.version) != (old.epoch, old.version):
            return None  # another compactor is at work
        log_entries = view.after(old.folded_id)
        num_entries, entries = self._decode(log_entries)
        if num_entries == 0 and log_entries:
            self.release()
            return None
        folded_id = log_entries[num_entries - 1][0] if num_entries else old.folded_id
        try:
            new = self._fold(old, entries, folded_id, Lease(token, stored.epoch))
        except _FoldRefused:
            self._log_refusal("lease or epoch has changed")
            return None
        if new is None:
            return None
        return Fold(
            manifest=new,
            frame=new.encode(self._codec),
            replaces=old,
            num_entries=num_entries,
            has_more=num_entries >= self._settings.fold_entries,
        )

    def commit(self, fold: Fold[ManifestT]) -> bool:
        """Write the manifest of a prepared fold. False: Redis refused it and nothing has changed. Raises StoreError."""
        new, old, settings = fold.manifest, fold.replaces, self._settings
        verdict = self._store.write_manifest(
            fold.frame,
            token=new.fencing_token,
            epoch=new.epoch,
            replaces=old.version,
            version=new.version,
            folded_id=new.folded_id,
            keep_s=settings.keep_s,
        )
        if verdict != "ok":
            self._log_refusal(verdict)
            return False
        self.counters.folds += 1
        self.counters.folded_entries += fold.num_entries
        if old.folded_id != START:
            self.counters.trimmed_entries += self._store.trim_log(new.version, old.folded_id)
        live, before = ([ref.digest for ref in manifest.segments] for manifest in (new, old))
        self._store.keep_live_segments(live, settings.keep_s)
        self._store.keep_segments([digest for digest in before if digest not in set(live)], settings.retire_s)
        return True

    def release(self) -> None:
        """Let another compactor take over at once. Raises StoreError."""
        self._store.release_lease(self._owner)

    def _release_sometimes(self) -> bool:
        """After a fold: whether the lease was released, since the process folds others. Raises StoreError."""
        folds_others = len(self._folding) > (self in self._folding)
        if not (self._may_rest and folds_others) or random.random() >= _RELEASE_PROBABILITY:
            return False
        self.release()
        return True

    def _write_segment(self, ref: RefT, frame: bytes, lease: Lease) -> RefT:
        if not self._store.write_segment(
            ref.digest, frame, keep_s=self._settings.keep_s, token=lease.token, epoch=lease.epoch
        ):
            raise _FoldRefused
        return ref

    def _read_segment(self, ref: RefT) -> SegmentT | None:
        """None, and counted, if it is lost or damaged."""
        frame = self._store.read_segment(ref.digest, ref.num_bytes)
        try:
            if frame is not None:
                return self._payload.decode_segment(self._codec, ref.digest, frame)
        except FormatError as error:
            log.warning("a segment of %s is left out: %s", self._store.keys, error)
        self.counters.lost_segments += 1
        return None

    def _acquire_lease(self) -> int | None:
        """Fencing token of a new or renewed lease. None: another compactor has it, or the namespace has no epoch; then
        no lease is taken, since it would leave keys behind."""
        settings, self._is_other_at_work = self._settings, False
        if self._store.read_epoch() is None:
            return None
        token = self._store.acquire_lease(self._owner, max(1, int(settings.lease_s * 1000)), settings.keep_s)
        self._is_other_at_work = token is None
        return token

    def _current_manifest(self, stored: StoredManifest, epoch: str) -> ManifestT | None:
        """The stored manifest, or an empty one. None: it has a later format or key."""
        if stored.frame is not None:
            try:
                manifest = self._payload.manifest.decode(self._codec, stored.frame)
                if manifest.epoch == epoch and manifest.version == stored.version:
                    return manifest
            except FormatError as error:
                if error.reason == "newer":
                    self._leave("the manifest", error)
                    return None
                log.warning("the manifest of %s is replaced: %s", self._store.keys, error)
        return self._empty_manifest(epoch, stored.version)

    def _decode(self, log_entries: list[tuple[str, bytes]]) -> tuple[int, list[EntryT]]:
        """The number of entries to fold, and the decoded ones; damaged entries are counted and left out."""
        entries: list[EntryT] = []
        for row, (_, frame) in enumerate(log_entries):
            try:
                entries.append(self._payload.decode_entry(self._codec, frame))
            except FormatError as error:
                if error.reason == "newer":
                    self._leave("the log", error)
                    return row, entries
                log.debug("an entry of %s is left out: %s", self._store.keys, error)
                self.counters.corrupt_entries += 1
        return len(log_entries), entries

    def _log_refusal(self, reason: str) -> None:
        log.info("a fold of %s was refused: %s", self._store.keys, reason)

    def _leave(self, what: str, error: FormatError) -> None:
        """Leave data of a later format or key to newer compactors, during an upgrade or a change of keys.

        The caller releases the lease if nothing is folded: renewed every turn, it would keep the others out.
        """
        if self.counters.left_folds == 0:
            log.warning("%s of %s is left to newer compactors: %s", what, self._store.keys, error)
        self.counters.left_folds += 1


Folding = WeakSet[FencedCompactor[Any, Any, Any, Any]]
