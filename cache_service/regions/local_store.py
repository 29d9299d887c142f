"""A cluster's own Redis, as the exchange of regions uses it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cache_service.errors import FormatError, StoreRefused
from cache_service.formats.documents import Piece
from cache_service.formats.frame import FrameCodec
from cache_service.formats.manifest import Generation, Manifest
from cache_service.formats.namespaces import REGIONS, imported
from cache_service.formats.purged_times import PurgedTimes
from cache_service.formats.segment import SegmentEntry, decode_segment, encode_segment
from cache_service.formats.stream_id import START
from cache_service.regions.records import Refs, RegionsState
from cache_service.store.admin_store import AdminStore
from cache_service.store.store import OpenNamespace, StoredManifest

STATE_AREA = "state"
_RETIRE_S = 60  # time to live of a replaced segment, for readers of the previous manifest
_WRITE_LEASE_MS = 60_000


@dataclass(frozen=True, slots=True)
class Own:
    """What a namespace of this cluster holds in segments."""

    epoch: str | None
    refs: Refs


@dataclass(frozen=True, slots=True)
class Opened:
    """An imported namespace before it is written to. A purge after that has the writes refused."""

    epoch: str
    purges: PurgedTimes  # noted for it, and for the namespace here that it goes with


class LocalStore(Protocol):
    """Methods raise StoreError. Namespaces are those of this cluster; imports go into separate ones."""

    def lead(self) -> bool:
        """Become or stay the one that works. False: another process does."""

    def resign(self) -> None: ...

    def now_ms(self) -> int: ...

    def load(self) -> RegionsState:
        """Raises FormatError "newer" for what a later version has written."""

    def save(self, state: RegionsState) -> RegionsState:
        """The state as saved. Refused if it is not the one that follows what `load` or `save` returned last."""

    def own(self, namespace: str) -> Own: ...

    def read(self, namespace: str, ref: SegmentEntry) -> list[Piece] | None:
        """None: it is lost or damaged."""

    def open(self, namespace: str) -> Opened: ...

    def put(self, namespace: str, epoch: str, pieces: Sequence[Piece], max_bytes: int) -> SegmentEntry | None:
        """Store an imported segment. Refused if the epoch has ended. None: it would take more than max_bytes."""

    def replace(self, namespace: str, epoch: str, refs: Sequence[SegmentEntry]) -> None:
        """Make these the contents of the imported namespace. Refused if the epoch has ended."""

    def lost(self, namespace: str, refs: Sequence[SegmentEntry]) -> set[str]:
        """Extend the life of the imported namespace. Returns the segments that are not there any more."""


class RedisLocalStore:
    """Not thread-safe."""

    def __init__(self, open_namespace: OpenNamespace, keep_s: int, lease_ms: int) -> None:
        self._open_namespace = open_namespace
        self._keep_s = keep_s
        self._lease_ms = lease_ms
        self._owner = secrets.token_hex(16)
        store, self._codec = open_namespace(REGIONS)
        self._state = store.beside(STATE_AREA)
        self._token = 0

    def lead(self) -> bool:
        self._token = self._state.acquire_lease(self._owner, self._lease_ms, self._keep_s) or 0
        return self._token > 0

    def resign(self) -> None:
        self._state.release_lease(self._owner)

    def now_ms(self) -> int:
        try:
            return self._state.server_time_ms()
        except StoreRefused:  # no permission
            return int(time.time() * 1000)

    def load(self) -> RegionsState:
        epoch = self._state.begin_epoch(self._keep_s)
        stored = self._state.read_manifest()
        return decode_state(self._codec, stored) or RegionsState(epoch, stored.version, 0)

    def save(self, state: RegionsState) -> RegionsState:
        saved = RegionsState(
            state.epoch,
            state.version + 1,
            self._token,
            own=state.own,
            listings=state.listings,
            held=state.held,
            purged=state.purged,
            rules=state.rules,
        )
        verdict = self._state.write_manifest(
            saved.encode(self._codec),
            token=self._token,
            epoch=state.epoch,
            replaces=state.version,
            version=saved.version,
            folded_id=START,
            keep_s=self._keep_s,
        )
        if verdict != "ok":
            raise StoreRefused(f"another process exchanges with other clusters: {verdict}")
        return saved

    def own(self, namespace: str) -> Own:
        store, codec = self._open_namespace(namespace)
        manifest, stored = _manifest(codec, store.read_manifest())
        return Own(stored.epoch, () if manifest is None else tuple(manifest.segments))

    def read(self, namespace: str, ref: SegmentEntry) -> list[Piece] | None:
        store, codec = self._open_namespace(namespace)
        frame = store.read_segment(ref.digest, ref.num_bytes)
        try:
            return None if frame is None else decode_segment(codec, ref.digest, frame).pieces()
        except FormatError:
            return None

    def open(self, namespace: str) -> Opened:
        purges = PurgedTimes()
        epoch = self._imported(namespace)[0].begin_epoch(self._keep_s)
        # After the epoch: a purge notes itself before it ends one.
        for name in (namespace, imported(namespace)):
            store, _ = self._open_namespace(name)
            for purged in AdminStore(store.connection, store.keys).noted_purges().ranges:
                purges = purges.and_also(purged)
        return Opened(epoch, purges)

    def put(self, namespace: str, epoch: str, pieces: Sequence[Piece], max_bytes: int) -> SegmentEntry | None:
        store, codec = self._imported(namespace)
        entry, frame = encode_segment(codec, pieces)
        if len(frame) > max_bytes:
            return None
        if not store.write_segment(
            entry.digest, frame, keep_s=self._keep_s, token=self._write_token(namespace), epoch=epoch
        ):
            raise StoreRefused("an imported namespace has been purged, or somebody else writes it")
        return entry

    def replace(self, namespace: str, epoch: str, refs: Sequence[SegmentEntry]) -> None:
        store, codec = self._imported(namespace)
        token = self._write_token(namespace)
        before, stored = _manifest(codec, store.read_manifest())
        if before is not None and list(before.segments) == list(refs):
            store.release_lease(self._owner)
            return
        # A generation number new to readers, so that they replace the previous one as a whole.
        version = stored.version + 1
        generation = Generation(version, self.now_ms() // 1000, tuple(refs))
        new = Manifest(epoch, version, token, generations=(generation,), folded_generation=version)
        verdict = store.write_manifest(
            new.encode(codec),
            token=token,
            epoch=epoch,
            replaces=stored.version,
            version=version,
            folded_id=START,
            keep_s=self._keep_s,
        )
        if verdict != "ok":
            raise StoreRefused(f"an imported namespace was not written: {verdict}")
        live = {ref.digest for ref in refs}
        gone = [ref.digest for ref in (before.segments if before is not None else ()) if ref.digest not in live]
        store.keep_segments(gone, _RETIRE_S)
        store.release_lease(self._owner)

    def lost(self, namespace: str, refs: Sequence[SegmentEntry]) -> set[str]:
        store, _ = self._imported(namespace)
        store.keep_manifest(self._keep_s)
        digests = [ref.digest for ref in refs]
        if store.keep_live_segments(digests, self._keep_s) == len(digests):
            return set()
        return {digest for digest in digests if not store.keep_live_segments([digest], self._keep_s)}

    def _imported(self, namespace: str):  # type: ignore[no-untyped-def]
        return self._open_namespace(imported(namespace))

    def _write_token(self, namespace: str) -> int:
        store, _ = self._imported(namespace)
        token: int | None = store.acquire_lease(self._owner, _WRITE_LEASE_MS, self._keep_s)
        if token is None:
            raise StoreRefused("somebody else writes an imported namespace")
        return token


def decode_state(codec: FrameCodec, stored: StoredManifest) -> RegionsState | None:
    """None: there is none that can be read. Raises FormatError "newer" for what a later version has written."""
    if stored.frame is None:
        return None
    try:
        state = RegionsState.decode(codec, stored.frame)
    except FormatError as error:
        if error.reason == "newer":
            raise
        return None
    return state if (state.epoch, state.version) == (stored.epoch, stored.version) else None


def _manifest(codec: FrameCodec, stored: StoredManifest) -> tuple[Manifest | None, StoredManifest]:
    if stored.frame is None:
        return None, stored
    try:
        manifest = Manifest.decode(codec, stored.frame)
    except FormatError:
        return None, stored
    return (manifest if manifest.epoch == stored.epoch else None), stored
