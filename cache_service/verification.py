"""Checks every object that a namespace keeps in Redis, as its readers would, and more."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cache_service.admin_store import AdminStore
from cache_service.documents import Piece
from cache_service.entry_codec import decode_entry
from cache_service.errors import FormatError
from cache_service.frame import FrameCodec
from cache_service.manifest import Manifest, SegmentEntry, decode_manifest
from cache_service.segment import MAX_SEGMENT_BYTES, decode_segment
from cache_service.store import Store
from cache_service.stream_id import START

_READ_ENTRIES = 256
_SEGMENT = "segment:"
_EPOCH = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that readers leave out, or that should not be there."""

    kind: str  # of the key, as in "log" or "segment:3fa0..."
    detail: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found. No problems: every object is whole, and belongs where it is."""

    fingerprint: str
    namespace: str
    objects: int  # that were checked: entries, segments, and the manifest
    tokens: int  # in them, those that lie in more than one included
    unused_segments: int  # of earlier folds: whole or not, nobody reads them, and they expire
    other_keys: tuple[str, ...]  # kinds that are not checked here
    problems: tuple[Problem, ...]


class Verifier:
    """One check of one namespace. It changes nothing; a fold meanwhile is no problem."""

    def __init__(self, store: Store, admin: AdminStore, codec: FrameCodec) -> None:
        self._store = store
        self._admin = admin
        self._codec = codec
        self._objects = 0
        self._tokens = 0
        self._problems: list[Problem] = []

    def run(self) -> Verification:
        """Raises StoreError."""
        stored = self._store.read_manifest()
        if stored.epoch is not None and not _EPOCH.fullmatch(stored.epoch):
            self._problem("epoch", f"it is {stored.epoch[:70]!r}; it must be hexadecimal")
        manifest = None
        if stored.frame is not None:
            manifest = self._manifest(stored.frame, stored.epoch, stored.version)
        elif stored.version:
            self._problem("manifest", "it has no body, or one that is far too large")
        self._log()
        if manifest is not None:
            for _, entry in manifest.segments:
                self._segment(entry, manifest.version)
        kinds = self._admin.kinds()
        used = {f"{_SEGMENT}{entry.digest}" for _, entry in manifest.segments} if manifest is not None else set()
        if self._store.read_manifest().version == stored.version:
            self._unused([kind for kind in kinds if kind.startswith(_SEGMENT) and kind not in used])
        others = [kind for kind in kinds if kind.partition(":")[0] not in _KNOWN]
        for kind in kinds:
            if kind not in others and self._admin.ttl_s(kind) is None:
                self._problem(kind, "it never expires")
        return Verification(
            self._store.keys.fingerprint,
            self._store.keys.namespace,
            self._objects,
            self._tokens,
            sum(kind.startswith(_SEGMENT) and kind not in used for kind in kinds),
            tuple(others),
            tuple(self._problems),
        )

    def _problem(self, kind: str, detail: str) -> None:
        self._problems.append(Problem(kind, detail))

    def _count(self, pieces: list[Piece]) -> int:
        num_tokens = sum(len(piece.token_ids) for piece in pieces)
        self._tokens += num_tokens
        return num_tokens

    def _manifest(self, frame: bytes, epoch: str | None, version: int) -> Manifest | None:
        self._objects += 1
        try:
            manifest = decode_manifest(self._codec, frame)
        except FormatError as error:
            self._problem("manifest", str(error))
            return None
        if manifest.epoch != epoch:
            self._problem("manifest", f"it is of epoch {manifest.epoch[:70]!r}; the namespace has {epoch!r}")
            return None
        if manifest.version != version:
            self._problem("manifest", f"its body has version {manifest.version}; its field says {version}")
        return manifest

    def _log(self) -> None:
        for entry_id, frame in self._store.log_after(START, _READ_ENTRIES):
            self._objects += 1
            try:
                self._count(decode_entry(self._codec, frame))
            except FormatError as error:
                self._problem("log", f"entry {entry_id}: {error}")

    def _segment(self, entry: SegmentEntry, version: int) -> None:
        kind = f"{_SEGMENT}{entry.digest}"
        frame = self._admin.read_segment_whole(entry.digest, entry.num_bytes)
        if not frame:
            if self._store.read_manifest().version == version:  # else it may have been retired, and expired
                self._problem(kind, "it is missing")
            return
        self._objects += 1
        if len(frame) != entry.num_bytes:
            size = f"more than {entry.num_bytes}" if len(frame) > entry.num_bytes else str(len(frame))
            self._problem(kind, f"it has {size} bytes; the manifest says {entry.num_bytes}")
            return
        try:
            pieces = decode_segment(self._codec, entry.digest, frame)
        except FormatError as error:
            self._problem(kind, str(error))
            return
        num_tokens = self._count(pieces)
        times = [piece.time_s for piece in pieces]
        if num_tokens != entry.num_tokens or (min(times), max(times)) != (entry.first_s, entry.last_s):
            self._problem(kind, f"it has {num_tokens} tokens or other times; the manifest says {entry.num_tokens}")

    def _unused(self, kinds: list[str]) -> None:
        for kind in kinds:
            digest = kind.removeprefix(_SEGMENT)
            if not re.fullmatch("[0-9a-f]{64}", digest):
                self._problem(kind, "its name is no SHA-256")
                continue
            frame = self._admin.read_segment_whole(digest, MAX_SEGMENT_BYTES)
            if not frame:
                continue  # expired
            self._objects += 1
            try:
                self._count(decode_segment(self._codec, digest, frame))
            except FormatError as error:
                self._problem(kind, str(error))


_KNOWN = frozenset({"epoch", "log", "manifest", "lease", "fence", "purges", "earnings", "segment"})
