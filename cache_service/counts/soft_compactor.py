"""Adds the deltas of soft n-gram counts up to parts, one compactor at a time: see `fenced_fold`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache_service.counts.soft_codec import MAX_PART_CONTEXTS, area_of, decode_delta, decode_part, encode_part
from cache_service.counts.soft_manifest import (
    SoftManifest,
    SoftPart,
    decode_soft_manifest,
    encode_soft_manifest,
    num_absorbed,
)
from cache_service.counts.soft_ngram import MIN_BYTES, SLOT_BYTES, Entries, SoftNgramTable
from cache_service.errors import FormatError
from cache_service.formats.frame import FrameCodec
from cache_service.log.fenced_fold import FencedCompactor, Fold, FoldCounters, FoldSettings
from cache_service.setting_bounds import require_bounds
from cache_service.store.store import Store, StoredManifest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftCompactorSettings(FoldSettings):
    """How soft counts are folded. Raises SettingError."""

    max_contexts: int = 2**18  # that a namespace keeps in Redis; 60 bytes each before compression
    lease_s: float = 60.0
    fold_entries: int = 16
    fold_every_s: float = 15.0

    def __post_init__(self) -> None:
        FoldSettings.__post_init__(self)
        require_bounds(self, max_contexts=(64, 2**26), fold_entries=(1, 4096))


@dataclass(slots=True)
class SoftCompactorCounters(FoldCounters):
    """Since the start."""

    lost_parts: int = 0  # that were to be written anew and could not be read
    evicted_contexts: int = 0  # that had to go where there were too many


class SoftCompactor(FencedCompactor[SoftManifest]):
    """Compacts the soft counts of one namespace and order. Not thread-safe."""

    def __init__(
        self, store: Store, codec: FrameCodec, order: int, settings: SoftCompactorSettings | None = None
    ) -> None:
        """store: of the namespace, any area of it; order: of the tables."""
        super().__init__(store.beside(area_of(order)))
        self.counters: SoftCompactorCounters = SoftCompactorCounters()
        self._settings: SoftCompactorSettings = settings or SoftCompactorSettings()
        self._codec = codec
        self._order = order

    def prepare(self) -> Fold[SoftManifest] | None:
        token = self._lease()
        if token is None:
            return None
        stored = self._store.read_manifest()
        if stored.epoch is None:
            return None  # nothing was ever written
        old = self._manifest(stored, stored.epoch)
        if old is None:
            self.release()
            return None
        entries = self._unfolded(old)
        if entries is None:
            return None
        num_entries, deltas = self._decode(entries, old.epoch)
        if num_entries == 0:
            if entries:
                self.release()
            return None
        parts = self._write_parts(old.parts, deltas, token, old.epoch)
        if parts is None:
            self._refused("lease or data set are others by now")
            return None
        new = SoftManifest(old.epoch, old.version + 1, token, parts, entries[num_entries - 1][0])
        live, before = ([part.digest for part in manifest.parts] for manifest in (new, old))
        return self._prepared(new, encode_soft_manifest(self._codec, new), old, live, before, num_entries)

    def _manifest(self, stored: StoredManifest, epoch: str) -> SoftManifest | None:
        """The manifest there is, or an empty one. None: it is not ours."""
        if stored.frame is not None:
            try:
                manifest = decode_soft_manifest(self._codec, stored.frame)
                if manifest.epoch == epoch and manifest.version == stored.version:
                    return manifest
            except FormatError as error:
                if error.reason == "newer":
                    self._leave("the manifest", error)
                    return None
                log.warning("the soft manifest of %s is replaced: %s", self._store.keys.namespace, error)
        return SoftManifest(epoch, stored.version, 0)

    def _decode(self, entries: list[tuple[str, bytes]], epoch: str) -> tuple[int, list[Entries]]:
        """How many entries are to be folded, and what they say of this data set."""
        deltas: list[Entries] = []
        for row, (_, frame) in enumerate(entries):
            try:
                delta = decode_delta(self._codec, self._order, frame)
            except FormatError as error:
                if error.reason == "newer":
                    self._leave("the log", error)
                    return row, deltas
                log.debug("soft counts of %s are left out: %s", self._store.keys.namespace, error)
                self.counters.corrupt_entries += 1
                continue
            if delta.epoch == epoch:
                deltas.append(delta.entries)
        return len(entries), deltas

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
