"""Adds the deltas of soft n-gram counts up to parts, one compactor at a time.

As `compactor` does with tokens: a lease says who works, the write of the manifest is fenced, parts are named by their
content and written first, and the log is trimmed only up to where the fold before this one ended.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache_service.errors import FormatError
from cache_service.frame import FrameCodec
from cache_service.setting_bounds import require_bounds
from cache_service.soft_codec import MAX_PART_CONTEXTS, area_of, decode_delta, decode_part, encode_part
from cache_service.soft_manifest import (
    SoftManifest,
    SoftPart,
    decode_soft_manifest,
    encode_soft_manifest,
    num_absorbed,
)
from cache_service.soft_ngram import MIN_BYTES, SLOT_BYTES, Entries, SoftNgramTable
from cache_service.store import KEEP_S, Store, StoredManifest
from cache_service.stream_id import START

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SoftCompactorSettings:
    """How soft counts are folded. Raises SettingError."""

    max_contexts: int = 2**18  # that a namespace keeps in Redis; 60 bytes each before compression
    lease_s: float = 60.0
    fold_entries: int = 16  # of the log, at most, in a fold
    keep_s: int = KEEP_S  # that they live after the last fold
    retire_s: int = 600  # that a part stays for readers of the manifest before
    fold_every_s: float = 15.0

    def __post_init__(self) -> None:
        require_bounds(
            self,
            max_contexts=(64, 2**26),
            lease_s=(0.01, 3600),
            fold_entries=(1, 4096),
            keep_s=(1, 2**31),
            retire_s=(1, 2**31),
            fold_every_s=(0.01, 3600),
        )


@dataclass(slots=True)
class SoftCompactorCounters:
    """Since the start."""

    folds: int = 0
    folded_entries: int = 0
    corrupt_entries: int = 0
    lost_parts: int = 0  # that were to be written anew and could not be read
    evicted_contexts: int = 0  # that had to go where there were too many
    trimmed_entries: int = 0
    left_folds: int = 0  # because manifest or log are of a later format or key
    refused_folds: int = 0  # by a newer lease, data set or manifest
    failures: int = 0  # Redis was unavailable or refused


@dataclass(frozen=True, slots=True)
class SoftFold:
    """A fold that is prepared: its parts are written, its manifest is not."""

    manifest: SoftManifest
    frame: bytes
    replaces: int  # version of the manifest that it was made from
    keep_from: str  # first id of the log that stays
    retired: tuple[str, ...]  # digests that the new manifest no longer mentions
    num_entries: int
    has_more: bool  # the log goes on after what was folded


class SoftCompactor:
    """Compacts the soft counts of one namespace and order. Not thread-safe."""

    def __init__(
        self, store: Store, codec: FrameCodec, order: int, settings: SoftCompactorSettings | None = None
    ) -> None:
        """store: of the namespace, any area of it; order: of the tables."""
        self.counters = SoftCompactorCounters()
        self._store = store.beside(area_of(order))
        self._codec = codec
        self._order = order
        self._settings = settings or SoftCompactorSettings()
        self._owner = secrets.token_hex(16)

    def fold(self) -> bool:
        """Fold once, if this compactor may and there is something. True if there is more. Raises StoreError."""
        fold = self.prepare()
        return fold is not None and self.commit(fold) and fold.has_more

    def prepare(self) -> SoftFold | None:
        """Read the log and write the parts of its next entries. None: another one compacts, or nothing is to be done.

        Raises StoreError.
        """
        settings = self._settings
        token = self._store.acquire_lease(self._owner, max(1, int(settings.lease_s * 1000)), settings.keep_s)
        if token is None:
            return None
        stored = self._store.read_manifest()
        if stored.epoch is None:
            return None  # nothing was ever written
        old = self._manifest(stored, stored.epoch)
        if old is None:
            return None
        view = self._store.read_log(old.folded_id, settings.fold_entries + 1)
        if view.epoch != old.epoch or view.version != old.version:
            return None  # somebody else is at work
        entries = view.entries
        if entries and entries[0][0] == old.folded_id:
            entries = entries[1:]
        num_entries, deltas = self._decode(entries, old.epoch)
        if num_entries == 0:
            return None
        parts = self._write_parts(old.parts, deltas, token, old.epoch)
        if parts is None:
            self._refused("lease or data set are others by now")
            return None
        new = SoftManifest(old.epoch, old.version + 1, token, parts, entries[num_entries - 1][0])
        live = {part.digest for part in parts}
        return SoftFold(
            manifest=new,
            frame=encode_soft_manifest(self._codec, new),
            replaces=old.version,
            keep_from=old.folded_id,
            retired=tuple(part.digest for part in old.parts if part.digest not in live),
            num_entries=num_entries,
            has_more=num_entries >= settings.fold_entries,
        )

    def commit(self, fold: SoftFold) -> bool:
        """Make a prepared fold the truth. False if Redis refused it: then nothing has changed. Raises StoreError."""
        new, keep_s = fold.manifest, self._settings.keep_s
        verdict = self._store.write_manifest(
            fold.frame, new.fencing_token, new.epoch, fold.replaces, new.version, new.folded_id, keep_s
        )
        if verdict != "ok":
            self._refused(verdict)
            return False
        self.counters.folds += 1
        self.counters.folded_entries += fold.num_entries
        if fold.keep_from != START:
            self.counters.trimmed_entries += self._store.trim_log(new.version, fold.keep_from)
        self._store.keep_live_segments([part.digest for part in new.parts], keep_s)
        self._store.keep_segments(fold.retired, self._settings.retire_s)
        return True

    def release(self) -> None:
        """Let another compactor take over at once. Raises StoreError."""
        self._store.release_lease(self._owner)

    def _manifest(self, stored: StoredManifest, epoch: str) -> SoftManifest | None:
        """The manifest there is, or an empty one. None: it is not ours."""
        if stored.frame is not None:
            try:
                manifest = decode_soft_manifest(self._codec, stored.frame)
                if manifest.epoch == epoch and manifest.version == stored.version:
                    return manifest
            except FormatError as error:
                if error.reason == "newer":
                    self._leave(error)
                    return None
                log.warning("the soft manifest of %s is replaced: %s", self._store.keys.namespace, error)
        return SoftManifest(epoch, stored.version, 0)

    def _leave(self, error: FormatError) -> None:
        """To compactors that can read it: in an upgrade or a change of keys, others know more than this one."""
        if self.counters.left_folds == 0:
            log.warning("soft counts of %s are left to others: %s", self._store.keys.namespace, error)
        self.counters.left_folds += 1
        self.release()  # renewed turn after turn, the lease would keep out those that can read it

    def _decode(self, entries: list[tuple[str, bytes]], epoch: str) -> tuple[int, list[Entries]]:
        """How many entries are to be folded, and what they say of this data set."""
        deltas: list[Entries] = []
        for row, (_, frame) in enumerate(entries):
            try:
                delta = decode_delta(self._codec, self._order, frame)
            except FormatError as error:
                if error.reason == "newer":
                    self._leave(error)
                    return row, deltas
                log.debug("soft counts of %s are left out: %s", self._store.keys.namespace, error)
                self.counters.corrupt_entries += 1
                continue
            if delta.epoch == epoch:
                deltas.append(delta.entries)
        return len(entries), deltas

    def _refused(self, reason: str) -> None:
        log.info("a fold of soft counts of %s was refused: %s", self._store.keys.namespace, reason)
        self.counters.refused_folds += 1

    def _write_parts(
        self, parts: Sequence[SoftPart], deltas: list[Entries], token: int, epoch: str
    ) -> tuple[SoftPart, ...] | None:
        """What the manifest is to name when the deltas are added. None: Redis refused a part, because somebody has
        taken the lease, or ended the epoch to purge it."""
        num_new = sum(len(delta.keys) for delta in deltas)
        if not num_new:
            return tuple(parts)
        sizes = [part.num_contexts for part in parts]
        num_kept = len(parts) - num_absorbed(sizes, num_new, self._settings.max_contexts)
        before = [entries for part in parts[num_kept:] if (entries := self._read_part(part)) is not None]
        merged = self._merge([*before, *deltas], is_over=sum(sizes) + num_new > self._settings.max_contexts)
        kept = list(parts[:num_kept])
        for begin in range(0, len(merged.keys), MAX_PART_CONTEXTS):
            part = encode_part(self._codec, self._order, merged.rows(slice(begin, begin + MAX_PART_CONTEXTS)))
            if not self._store.write_segment(part.digest, part.frame, self._settings.keep_s, token, epoch):
                return None
            kept.append(SoftPart(part.digest, part.num_contexts, len(part.frame)))
        return tuple(kept)

    def _merge(self, summands: list[Entries], is_over: bool) -> Entries:
        """The sum, oldest first. Where all are too many, a quarter less stays than may: not every fold is to find it
        so again."""
        slots = 2 * sum(len(entries.keys) for entries in summands)  # half full, so that none has to make room
        if is_over:
            slots = self._settings.max_contexts * 3 // 4
        table = SoftNgramTable(max(slots * SLOT_BYTES, MIN_BYTES), self._order)
        for entries in summands:
            table.merge_entries(entries)
        self.counters.evicted_contexts += table.stats.evicted
        merged = table.entries()
        return merged.rows(np.argsort(merged.keys))  # parts do not depend on the size of a table

    def _read_part(self, part: SoftPart) -> Entries | None:
        frame = self._store.read_segment(part.digest, part.num_bytes)
        try:
            if frame is not None:
                return decode_part(self._codec, self._order, part.digest, frame)
        except FormatError as error:
            log.warning("a part of %s is left out: %s", self._store.keys.namespace, error)
        self.counters.lost_parts += 1
        return None
