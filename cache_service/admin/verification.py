"""Checks every object of a namespace in Redis, more strictly than its readers do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cache_service.counts.soft_codec import SoftPart, order_of, soft_payload
from cache_service.counts.soft_ngram import Entries
from cache_service.errors import FormatError
from cache_service.formats.documents import Piece
from cache_service.formats.folded_manifest import FoldedManifest, SegmentRef
from cache_service.formats.frame import FrameCodec
from cache_service.formats.piece_codec import PieceColumns
from cache_service.formats.segment import SegmentEntry
from cache_service.formats.stream_id import START
from cache_service.log.payload import TOKENS, Payload
from cache_service.promotion.candidate_codec import decode_candidate
from cache_service.store.admin_store import AdminStore
from cache_service.store.store import Store, StoredManifest

_READ_ENTRIES = 256
_SEGMENT = "segment:"
_GATE = "gate"
_PHRASES, _LEFT = f"{_GATE}:phrases", f"{_GATE}:left"
_EPOCH = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class Problem:
    """An object that readers leave out, or that should not exist."""

    kind: str  # the key's kind: "log", "segment:3fa0..."
    detail: str


@dataclass(frozen=True, slots=True)
class Verification:
    fingerprint: str
    namespace: str
    # Checked objects: entries, segments and manifests of tokens and of soft counts, and the promotion gate's objects.
    objects: int
    tokens: int  # in all objects; duplicates are counted
    unused_segments: int  # left by earlier folds; nobody reads them, and they expire
    other_keys: tuple[str, ...]  # kinds that are not checked here
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Checks:
    """Decoders and checks for one area."""

    payload: Payload[Any, Any, Any, Any]
    entry_tokens: Callable[[Any], int]
    segment_tokens: Callable[[Any, Any], int]
    """Takes a segment and its manifest entry, None if it has none. Raises FormatError."""


def _entry_tokens(pieces: list[Piece]) -> int:
    return sum(len(piece.token_ids) for piece in pieces)


def _segment_tokens(columns: PieceColumns, named: SegmentEntry | None) -> int:
    num_tokens, times = len(columns.token_ids), columns.times.tolist()
    found = (num_tokens, min(times, default=0), max(times, default=0))
    if named is not None and found != (named.num_tokens, named.first_s, named.last_s):
        limit = f"the manifest says {named.num_tokens}"
        raise FormatError("garbage", f"it has {num_tokens} tokens or other times; {limit}")
    return num_tokens


def _part_tokens(entries: Entries, named: SoftPart | None) -> int:
    num_contexts = len(entries.keys)
    if named is not None and num_contexts != named.num_contexts:
        raise FormatError("garbage", f"it has {num_contexts} contexts; the manifest says {named.num_contexts}")
    return 0


_TOKENS = _Checks(TOKENS, _entry_tokens, _segment_tokens)


class Verifier:
    """One check of one namespace. It changes nothing and tolerates concurrent folds."""

    def __init__(self, store: AdminStore, codec: FrameCodec) -> None:
        self._store = store
        self._codec = codec
        self._objects = 0
        self._tokens = 0
        self._unused_segments = 0
        self._problems: list[Problem] = []

    def run(self) -> Verification:
        """Raises StoreError."""
        # Listed first, so that segments written by a concurrent fold do not count as unused.
        kinds = self._store.kinds()
        epoch = self._store.read_manifest().epoch
        if epoch is not None and not _EPOCH.fullmatch(epoch):
            self._problem("epoch", f"it is {epoch[:70]!r}; it must be hexadecimal")
        self._check_area("", _TOKENS, kinds)
        areas = {area: order for kind in kinds if (order := order_of(area := kind.partition(":")[0])) is not None}
        for area, order in sorted(areas.items()):
            self._check_area(area, _Checks(soft_payload(order), lambda delta: 0, _part_tokens), kinds)
        self._check_gate(kinds)
        others = []
        for kind in kinds:
            area, _, rest = kind.partition(":")
            if kind == _LEFT:
                continue  # records of organisations that left the public pool never expire
            known = _KNOWN_OF_THE_GATE if area == _GATE else _KNOWN
            if (rest if area in areas or area == _GATE else kind).partition(":")[0] not in known:
                others.append(kind)
            elif self._store.ttl_s(kind) is None:
                self._problem(kind, "it never expires")
        return Verification(
            fingerprint=self._store.keys.fingerprint,
            namespace=self._store.keys.namespace,
            objects=self._objects,
            tokens=self._tokens,
            unused_segments=self._unused_segments,
            other_keys=tuple(others),
            problems=tuple(self._problems),
        )

    def _problem(self, kind: str, detail: str) -> None:
        self._problems.append(Problem(kind, detail))

    def _check_gate(self, kinds: Sequence[str]) -> None:
        """Check the promotion gate's phrases, and its note of who has left."""
        if _PHRASES in kinds:
            for phrase_id, frame in self._store.hash_fields(_PHRASES):
                self._objects += 1
                try:
                    decode_candidate(self._codec, frame)
                except FormatError as error:
                    self._problem(_PHRASES, f"phrase {phrase_id.hex()}: {error}")
        if _LEFT in kinds:
            for tenant, value in self._store.hash_fields(_LEFT):
                self._objects += 1
                if not re.fullmatch(rb"never|[0-9]{1,12}", value):
                    self._problem(_LEFT, f"tenant {tenant.hex()}: it is {value[:70]!r}; it must be a time, or never")

    def _check_area(self, area: str, checks: _Checks, kinds: Sequence[str]) -> None:
        """area: "" for tokens. kinds: the kinds of all keys of the namespace."""
        store = self._store.beside(area)
        prefix = f"{area}:" if area else ""
        stored = store.read_manifest()
        manifest = None
        if stored.frame is not None:
            manifest = self._manifest(stored, stored.frame, checks, f"{prefix}manifest")
        elif stored.version:
            self._problem(f"{prefix}manifest", "it has no body, or one that is far too large")
        for entry_id, frame in store.log_after(START, _READ_ENTRIES):
            self._objects += 1
            try:
                self._tokens += checks.entry_tokens(checks.payload.decode_entry(self._codec, frame))
            except FormatError as error:
                self._problem(f"{prefix}log", f"entry {entry_id}: {error}")
        named = [] if manifest is None else manifest.segments
        for entry in named:
            kind = f"{prefix}{_SEGMENT}{entry.digest}"
            segment = store.read_segment(entry.digest, entry.num_bytes)
            if segment:
                self._segment(kind, entry.digest, segment, checks, named=entry)
            elif store.read_manifest().version == stored.version:  # else it may have been retired, and expired
                self._problem(kind, "it is missing")
        self._check_unused(store, checks, kinds, prefix + _SEGMENT, used={entry.digest for entry in named})

    def _manifest(self, stored: StoredManifest, frame: bytes, checks: _Checks, kind: str) -> FoldedManifest | None:
        self._objects += 1
        try:
            manifest: FoldedManifest = checks.payload.manifest.decode(self._codec, frame)
        except FormatError as error:
            self._problem(kind, str(error))
            return None
        if manifest.epoch != stored.epoch:
            self._problem(kind, f"it is of epoch {manifest.epoch[:70]!r}; the namespace has {stored.epoch!r}")
            return None
        if manifest.version != stored.version:
            self._problem(kind, f"its body has version {manifest.version}; its field says {stored.version}")
        return manifest

    def _segment(self, kind: str, digest: str, frame: bytes, checks: _Checks, named: SegmentRef | None) -> None:
        self._objects += 1
        if named is not None and len(frame) != named.num_bytes:
            size = f"more than {named.num_bytes}" if len(frame) > named.num_bytes else str(len(frame))
            self._problem(kind, f"it has {size} bytes; the manifest says {named.num_bytes}")
            return
        try:
            segment = checks.payload.decode_segment(self._codec, digest, frame)
            self._tokens += checks.segment_tokens(segment, named)
        except FormatError as error:
            self._problem(kind, str(error))

    def _check_unused(self, store: Store, checks: _Checks, kinds: Sequence[str], prefix: str, used: set[str]) -> None:
        """Check segments of earlier folds, which no manifest names any more."""
        for kind in kinds:
            digest = kind.removeprefix(prefix)
            if not kind.startswith(prefix) or digest in used:
                continue
            self._unused_segments += 1
            if not re.fullmatch("[0-9a-f]{64}", digest):
                self._problem(kind, "its name is no SHA-256")
            elif frame := store.read_segment(digest, checks.payload.max_segment_bytes):  # else it has expired
                self._segment(kind, digest, frame, checks, named=None)


_KNOWN = frozenset({"epoch", "log", "manifest", "lease", "fence", "purges", "earnings", "segment"})
_KNOWN_OF_THE_GATE = frozenset({"phrases", "supporters", "offers", "lease"})
