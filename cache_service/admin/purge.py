"""Purges a namespace, or what was learnt in it in a time range, from Redis and from followers.

A purge takes the lease from any compactor, so that Redis refuses that one's segments and manifest from then on. It
notes the purged times, so that publishers drop queued tokens of these times. Then it replaces epoch, manifest and log
in one step: at their next look followers forget everything and read what is left. Finally it deletes the unreferenced
segments, including those of earlier folds.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cache_service.errors import FormatError, NamespaceBusy, NamespaceUnknown, NamespaceUnread, StoreError, StoreRefused
from cache_service.formats.documents import Piece, assemble, split_pieces
from cache_service.formats.entry_codec import decode_entry
from cache_service.formats.frame import FrameCodec
from cache_service.formats.manifest import Generation, Manifest
from cache_service.formats.purged_times import KEEP_S as PURGES_KEEP_S
from cache_service.formats.purged_times import LAST_S, TimeRange
from cache_service.formats.segment import MAX_SEGMENT_PIECES, SegmentEntry, decode_segment, encode_segment
from cache_service.formats.store_keys import StoreKeys
from cache_service.formats.stream_id import START
from cache_service.store.admin_store import AdminStore
from cache_service.store.store import KEEP_S

_LEASE_MS = 60_000
_READ_ENTRIES = 1024
_SEGMENT_TOKENS = 2**20
_ATTEMPTS = 5
_CLOCK_MARGIN_S = 1  # publishers also use the server's clock, up to a round trip

# Kinds that a purge does not delete: those of a new epoch, which may have begun meanwhile; `purges`, which expires; and
# who has left the public pool, which was not learnt.
_STAYS = frozenset({"epoch", "log", "manifest", "lease", "fence", "purges", "gate:left"})

# Kinds that stay where keys must be deleted before the purge can be noted: the epoch is ended afterwards.
_LAST = frozenset({"epoch", "purges", "gate:left"})


def unknown(keys: StoreKeys) -> NamespaceUnknown:
    return NamespaceUnknown(f"there is no namespace {keys.namespace!r} of model {keys.fingerprint} in the cache")


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """What a purge has removed."""

    fingerprint: str
    namespace: str
    tokens: int | None  # None: the whole namespace, which was not read
    keys: int  # in Redis


class Purge:
    """One purge of one namespace. Repeating an interrupted purge completes it."""

    def __init__(self, store: AdminStore, codec: FrameCodec, keep_s: int = KEEP_S) -> None:
        self._store = store
        self._keys = store.keys
        self._codec = codec
        self._keep_s = keep_s
        self._owner = secrets.token_hex(16)

    def everything(self) -> PurgeResult:
        """Raises StoreError, NamespaceUnknown if there was nothing, NamespaceBusy if another purge took over."""
        try:
            num_keys = self._everything()
        except StoreRefused:
            # A full server has no room to note a purge, but can delete. Or lease, fence or manifest have a wrong type.
            num_keys = self._store.delete([kind for kind in self._store.kinds() if kind not in _LAST])
            if num_keys == 0:
                raise
            num_keys += self._everything()
        if num_keys == 0:
            raise unknown(self._keys)
        return PurgeResult(self._keys.fingerprint, self._keys.namespace, None, num_keys)

    def _everything(self) -> int:
        """Number of deleted keys."""
        with self._lease() as token:
            self._store.note_purge(TimeRange(until_s=self._now_s()), PURGES_KEEP_S)
            num_keys = self._store.drop_all(token)
            if num_keys is None:
                raise self._busy()
            # Last, because it may take long; routers already forget.
            num_keys += self._delete([kind for kind in self._store.kinds() if kind not in _STAYS])
            self._store.end_lease(self._owner)
            return num_keys

    def learnt_in(self, times: TimeRange) -> PurgeResult:
        """Remove what was learnt in a time range, and all data without times: soft counts, hit statistics, phrases of
        the promotion gate. A piece of a document has the time of its newest part.

        Raises StoreError, NamespaceUnknown if there is no such namespace, NamespaceUnread where times cannot be read,
        NamespaceBusy if another purge took over.
        """
        if self._store.read_manifest().epoch is None:
            raise unknown(self._keys)
        until_s = min(times.until_s, self._now_s())
        with self._lease() as token:
            if times.since_s <= until_s:
                self._store.note_purge(TimeRange(times.since_s, until_s), PURGES_KEEP_S)
            for _ in range(_ATTEMPTS):
                num_tokens, kept = self._replace(token, times)
                if kept is not None:
                    stale = [kind for kind in self._store.kinds() if kind not in _STAYS | kept]
                    return PurgeResult(self._keys.fingerprint, self._keys.namespace, num_tokens, self._delete(stale))
        raise self._busy()

    @contextmanager
    def _lease(self) -> Iterator[int]:
        """Hold the lease in the block; yields its fencing token."""
        token = self._seize()
        try:
            yield token
        finally:
            with suppress(StoreError):  # it expires
                self._store.release_lease(self._owner)

    def _seize(self) -> int:
        return self._store.seize_lease(self._owner, _LEASE_MS, self._keep_s)

    def _now_s(self) -> int:
        try:
            now_s = self._store.server_time_ms() // 1000
        except StoreRefused:
            now_s = int(time.time())
        return min(LAST_S, now_s + _CLOCK_MARGIN_S)

    def _delete(self, kinds: list[str]) -> int:
        num_deleted = 0
        for begin in range(0, len(kinds), 1000):
            self._seize()  # renew, so that nobody folds meanwhile
            num_deleted += self._store.delete(kinds[begin : begin + 1000])
        return num_deleted

    def _busy(self) -> NamespaceBusy:
        return NamespaceBusy(f"somebody else works on namespace {self._keys.namespace}; try again")

    def _replace(self, token: int, times: TimeRange) -> tuple[int, frozenset[str] | None]:
        """Number of removed tokens, and kinds of the segments that stay; None: the namespace has changed meanwhile."""
        epoch = self._store.begin_epoch(self._keep_s)
        stored = self._store.read_manifest()
        old = self._manifest(stored.frame if stored.epoch == epoch else None, epoch, stored.version)
        last_id, unfolded = self._read_log(old, times)
        num_removed = unfolded.num_removed
        generations = []
        for generation in old.generations:
            segments: list[SegmentEntry] = []
            for entry in generation.segments:
                left, num_lost = self._purged_segment(entry, times, token, epoch)
                segments += left
                num_removed += num_lost
            generations.append(Generation(generation.number, generation.started_s, tuple(segments)))
        opened = generations[-1]
        added = self._write(unfolded.pieces, token, epoch)
        generations[-1] = Generation(opened.number, opened.started_s, (*opened.segments, *added))
        new = Manifest(
            epoch=secrets.token_hex(16),
            version=stored.version + 1,
            fencing_token=token,
            generations=tuple(generations),
            folded_id=START,
            folded_generation=opened.number,
        )
        verdict = self._store.replace_all(
            new.encode(self._codec),
            token=token,
            epoch=epoch,
            replaces=stored.version,
            new_epoch=new.epoch,
            last_id=last_id,
            keep_s=self._keep_s,
        )
        if verdict == "fenced":
            raise self._busy()
        if verdict != "ok":
            return 0, None
        digests = [entry.digest for entry in new.segments]
        self._store.keep_segments(digests, self._keep_s)
        return num_removed, frozenset(f"segment:{digest}" for digest in digests)

    def _manifest(self, frame: bytes | None, epoch: str, version: int) -> Manifest:
        empty = Manifest.empty(epoch, version, int(time.time()))
        if frame is None:
            return empty
        try:
            manifest = Manifest.decode(self._codec, frame)
        except FormatError as error:
            if error.reason == "newer":
                raise self._unread("manifest", error) from None
            return empty
        return manifest if manifest.epoch == epoch and manifest.version == version else empty

    def _read_log(self, old: Manifest, times: TimeRange) -> tuple[str, _Kept]:
        """The last id of the log, and what stays of its unfolded entries."""
        last_id, pieces = old.folded_id, []
        for last_id, frame in self._store.log_after(old.folded_id, _READ_ENTRIES):  # noqa: B007 (last_id is used below)
            try:
                pieces += decode_entry(self._codec, frame)
            except FormatError as error:
                if error.reason == "newer":
                    raise self._unread("log", error) from None
        return last_id, _Kept.of(pieces, times)

    def _purged_segment(
        self, entry: SegmentEntry, times: TimeRange, token: int, epoch: str
    ) -> tuple[list[SegmentEntry], int]:
        """The segments that replace a segment, and the number of removed tokens."""
        if not times.meets(entry.first_s, entry.last_s):
            return [entry], 0
        if times.holds(entry.first_s, entry.last_s):
            return [], entry.num_tokens
        frame = self._store.read_segment(entry.digest, entry.num_bytes)
        try:
            pieces = [] if frame is None else decode_segment(self._codec, entry.digest, frame).pieces()
        except FormatError as error:
            if error.reason == "newer":
                raise self._unread(f"segment {entry.digest[:12]}", error) from None
            return [], entry.num_tokens
        kept = _Kept.of(pieces, times)
        return self._write(kept.pieces, token, epoch), kept.num_removed

    def _write(self, pieces: list[Piece], token: int, epoch: str) -> list[SegmentEntry]:
        written = []
        for batch in split_pieces(assemble(pieces), _SEGMENT_TOKENS, MAX_SEGMENT_PIECES):
            entry, frame = encode_segment(self._codec, batch)
            if not self._store.write_segment(entry.digest, frame, keep_s=self._keep_s, token=token, epoch=epoch):
                raise self._busy()
            written.append(entry)
        return written

    def _unread(self, what: str, error: FormatError) -> NamespaceUnread:
        return NamespaceUnread(
            f"the times in the {what} of namespace {self._keys.namespace} cannot be read: {error}; purge all of it"
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """Pieces that stay, and the number of removed tokens."""

    pieces: list[Piece]
    num_removed: int

    @classmethod
    def of(cls, pieces: list[Piece], times: TimeRange) -> _Kept:
        kept = [piece for piece in pieces if not times.covers(piece.time_s)]
        num_tokens = sum(len(piece.token_ids) for piece in pieces)
        return cls(kept, num_tokens - sum(len(piece.token_ids) for piece in kept))
