"""One cluster's side of the exchange: it exports what it shares, and imports what others share into separate
namespaces.

Imports are never exported again, so each text has one origin, which alone decides how long it exists. Any object may be
lost, torn, old or duplicated: segments are checked by their names, listings by their generations.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from cache_service.errors import CacheError, FormatError, ObjectStoreError, StoreError, StoreRefused
from cache_service.formats.documents import Piece
from cache_service.formats.folded_manifest import MAX_MANIFEST_BYTES
from cache_service.formats.frame import FRAME_OVERHEAD, FrameCodec
from cache_service.formats.key_ring import SEAL_BYTES
from cache_service.formats.purged_times import LAST_S
from cache_service.formats.segment import SegmentEntry, decode_segment, encode_segment
from cache_service.regions.local_store import LocalStore, Opened
from cache_service.regions.object_store import ObjectStore
from cache_service.regions.plan import (
    RegionTerms,
    accepted,
    check_clock,
    forgotten,
    hides,
    kept,
    neutral,
    newest_within,
    next_generation,
    to_read,
    untouched,
    wanted,
)
from cache_service.regions.records import PUBLIC_LABEL, Held, Listing, Refs, RegionsState

log = logging.getLogger(__name__)

LISTING = "listing"
_MAX_LISTING_FRAME = MAX_MANIFEST_BYTES + FRAME_OVERHEAD + SEAL_BYTES
_MAX_FAULTS = 3  # of one cluster's objects in a turn, each of which may take a time limit; others are read all the same
_MAX_GROWTH = 2  # most that a segment is larger here than its object: all compress alike
_OF_SEGMENT = re.compile(r"[0-9a-f]{64}(\.part)?")


@dataclass(slots=True)
class RegionCounters:
    """Counts since the start."""

    exchanges: int = 0
    failures: int = 0  # Redis or the object store was unavailable or refused
    exported_bytes: int = 0
    exported_segments: int = 0
    imported_bytes: int = 0
    imported_segments: int = 0
    rejected_objects: int = 0  # torn, forged, of another key, or of a later version
    missing_segments: int = 0  # listed, but not there or not readable


@dataclass(frozen=True, slots=True)
class RegionGauges:
    """As of the last exchange of this process; zeros if another process of the cluster leads."""

    clusters: int = 0  # others that are heard
    segments: int = 0  # imported, and readable here
    bytes: int = 0
    lag_s: int = 0  # longest time since one of them wrote its listing


class RegionExchange:
    """Exchanges for one model. Not thread-safe."""

    def __init__(
        self, local: LocalStore, objects: ObjectStore, codec: FrameCodec, cluster: str, max_bytes: int, keep_s: int
    ) -> None:
        """codec: of the objects, the same in all clusters. cluster: this one's name. max_bytes: most that it shares,
        and most that it imports. keep_s: a cluster that writes nothing for so long is dropped."""
        self.counters = RegionCounters()
        self.gauges = RegionGauges()
        self._local = local
        self._objects = objects
        self._codec = codec
        self._cluster = cluster
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._encoded: dict[tuple[str, str], SegmentEntry] = {}  # objects by label and local segment
        self._faults: dict[str, list[ObjectStoreError]] = {}  # of this turn, by cluster

    def turn(self, terms: RegionTerms) -> None:
        """Exchange once, unless another process of the cluster leads. Raises CacheError; what was done stays.

        An object that the store does not give or delete is left out, and reported after all the rest is done."""
        self._faults = {}
        if not self._local.lead():
            self.gauges = RegionGauges()
            return
        state, opened = self._without_purged(self._loaded(), terms)
        failures: list[CacheError] = []
        for step in (self._export, self._import):
            try:
                state = self._local.save(step(state, terms, opened))
            except CacheError as error:  # a store that cannot be written may still be read
                failures.append(error)
        self._gauge(state)
        failures += [fault for faults in self._faults.values() for fault in faults]
        if failures:
            raise failures[0]
        self.counters.exchanges += 1

    def close(self) -> None:
        """Let another process lead. Raises StoreError."""
        self._local.resign()

    def _loaded(self) -> RegionsState:
        try:
            return self._local.load()
        except FormatError:  # of a later version or key, which another process may have
            with suppress(StoreError):
                self._local.resign()
            raise

    # --- purges

    def _without_purged(self, state: RegionsState, terms: RegionTerms) -> tuple[RegionsState, dict[str, Opened]]:
        """Drop imports that were purged here, are no longer shared, or were evicted."""
        first = state.own is None
        if first:
            state = self._recalled(state)
        since_s = 0 if state.own is None or first else state.own.time_s
        opened = {namespace: self._local.open(namespace) for namespace in {*terms.namespaces.values(), *state.held}}
        purged = dict(state.purged)
        for label, namespace in terms.namespaces.items():
            noted = opened[namespace].purges
            if noted.ranges:
                purged[label] = forgotten(purged.get(label, ()), noted, since_s, state.listings.values())
        labels = {namespace: label for label, namespace in terms.namespaces.items()}
        held: dict[str, Held] = {}
        for namespace, known in state.held.items():
            label = labels.get(namespace, "")
            is_shared = namespace in labels and (label != PUBLIC_LABEL or state.rules == terms.rules)
            left = untouched(known, purged.get(label, ())) if is_shared else Held()
            lost = self._local.lost(namespace, _entries(left))
            left = {digest: entry for digest, entry in left.items() if entry is None or entry.digest not in lost}
            self._local.replace(namespace, opened[namespace].epoch, _entries(left))
            if namespace in labels:
                held[namespace] = left
        new = msgspec.structs.replace(state, held=held, purged=purged, rules=terms.rules)
        return (new if new == state else self._local.save(new)), opened

    def _recalled(self, state: RegionsState) -> RegionsState:
        """With this cluster's own listing, which has outlived its Redis. Raises ObjectStoreError, and FormatError
        "newer": a listing written instead would forget what is purged."""
        frame = self._objects.read(self._cluster, LISTING, _MAX_LISTING_FRAME)
        if frame is None:
            return state
        try:
            own = self._decoded(self._cluster, frame)
        except FormatError as error:
            if error.reason == "newer":
                raise
            self._reject(self._cluster, LISTING, error)
            return state
        return msgspec.structs.replace(state, own=_without_purges(own), purged=own.purged)

    # --- export

    def _export(self, state: RegionsState, terms: RegionTerms, opened: Mapping[str, Opened]) -> RegionsState:
        there = self._objects.sizes(self._cluster)
        own = {label: self._local.own(namespace) for label, namespace in terms.namespaces.items()}
        chosen = newest_within({label: each.refs for label, each in own.items()}, self._max_bytes)
        encoded: dict[tuple[str, str], SegmentEntry] = {}
        shares: dict[str, Refs] = {}
        for label, refs in chosen.items():
            for ref in refs:
                if (found := self._exported(label, terms.namespaces[label], ref, there)) is not None:
                    encoded[label, ref.digest] = found
                    shares[label] = (*shares.get(label, ()), found)
        self._encoded = encoded
        now_ms = self._local.now_ms()
        listing = Listing(
            cluster=self._cluster,
            generation=next_generation(state.own, now_ms),
            time_s=min(now_ms // 1000, LAST_S),
            min_tenants=terms.min_tenants,
            shares=shares,
            purged=state.purged,
        )
        if any(each.epoch not in (None, self._local.own(terms.namespaces[label]).epoch) for label, each in own.items()):
            raise StoreRefused("a namespace was purged while it was exported")
        listing.check()
        self._stay()
        self._objects.write(self._cluster, LISTING, listing.encode(self._codec))
        self._delete(there.keys() - {ref.digest for refs in shares.values() for ref in refs})
        return msgspec.structs.replace(state, own=_without_purges(listing))

    def _delete(self, names: Iterable[str]) -> None:
        """Segments among the names, and what a crash has left of one."""
        for name in filter(_OF_SEGMENT.fullmatch, names):
            try:
                self._objects.delete(self._cluster, name)
            except ObjectStoreError as error:
                if self._is_beyond(self._cluster, name, error):
                    return

    def _exported(self, label: str, namespace: str, ref: SegmentEntry, there: Mapping[str, int]) -> SegmentEntry | None:
        """The object of a local segment, written if it is not there whole. None: the segment is lost."""
        known = self._encoded.get((label, ref.digest))
        if known is not None and there.get(known.digest) == known.num_bytes:
            return known
        pieces = self._local.read(namespace, ref)
        if pieces is None:
            return None
        entry, frame = encode_segment(self._codec, neutral(pieces) if label == PUBLIC_LABEL else pieces)
        if there.get(entry.digest) != len(frame):
            self._stay()
            self._objects.write(self._cluster, entry.digest, frame)
            self.counters.exported_bytes += len(frame)
            self.counters.exported_segments += 1
        return entry

    # --- import

    def _import(self, state: RegionsState, terms: RegionTerms, opened: Mapping[str, Opened]) -> RegionsState:
        now_s = self._local.now_ms() // 1000
        clusters = to_read(self._objects.clusters(), self._cluster, state.listings)
        found = [self._listing(cluster, now_s) for cluster in clusters]
        listings = accepted(
            state.listings, (each for each in found if each is not None), self._cluster, now_s, self._keep_s
        )
        held = {}
        for label, shares in wanted(listings, terms, self._max_bytes).items():
            namespace, purged = terms.namespaces[label], state.purged.get(label, ())
            before, epoch, after = state.held.get(namespace, {}), opened[namespace].epoch, Held()
            for cluster, refs in shares:
                for ref in refs:
                    if ref.digest in before:
                        after[ref.digest] = before[ref.digest]
                    elif hides(purged, ref):
                        after[ref.digest] = None
                    elif (pieces := self._fetched(cluster, ref)) is not None:
                        pieces = kept(pieces, label, purged, terms, listings[cluster].time_s)
                        after[ref.digest] = self._put(namespace, epoch, pieces, ref) if pieces else None
            if after or before:
                self._local.replace(namespace, epoch, _entries(after))
                held[namespace] = after
        return msgspec.structs.replace(state, listings=listings, held=held)

    def _put(self, namespace: str, epoch: str, pieces: list[Piece], ref: SegmentEntry) -> SegmentEntry | None:
        """None: it is much larger here than its object, which is crafted to pass by the budget."""
        entry = self._local.put(namespace, epoch, pieces, _MAX_GROWTH * ref.num_bytes)
        self.counters.rejected_objects += entry is None
        return entry

    def _listing(self, cluster: str, now_s: int) -> Listing | None:
        """None: it is lost or torn, or cannot be used here."""
        frame = self._read(cluster, LISTING, _MAX_LISTING_FRAME)
        if frame is None:
            return None
        try:
            listing = self._decoded(cluster, frame)
            check_clock(listing, now_s)
        except FormatError as error:
            self._reject(cluster, LISTING, error)
            return None
        return _without_purges(listing)

    def _decoded(self, cluster: str, frame: bytes) -> Listing:
        listing = Listing.decode(self._codec, frame)
        if listing.cluster != cluster:
            raise FormatError("garbage", f"it is the listing of cluster {listing.cluster}")
        return listing

    def _fetched(self, cluster: str, ref: SegmentEntry) -> list[Piece] | None:
        """None: it is lost or torn; the next turn tries again."""
        self._stay()
        frame = self._read(cluster, ref.digest, ref.num_bytes)
        if frame is None:
            self.counters.missing_segments += 1
            return None
        try:
            pieces = decode_segment(self._codec, ref.digest, frame).pieces()
        except FormatError as error:
            self._reject(cluster, ref.digest, error)
            return None
        self.counters.imported_bytes += len(frame)
        self.counters.imported_segments += 1
        return pieces

    def _read(self, cluster: str, name: str, max_bytes: int) -> bytes | None:
        """An object of another cluster. None: it is not there, or the store does not give it."""
        if len(self._faults.get(cluster, ())) >= _MAX_FAULTS:
            return None
        try:
            return self._objects.read(cluster, name, max_bytes)
        except ObjectStoreError as error:
            self._is_beyond(cluster, name, error)
            return None

    def _is_beyond(self, cluster: str, name: str, error: ObjectStoreError) -> bool:
        """Note a fault. Whether no more of the cluster's objects are to be tried in this turn."""
        faults = self._faults.setdefault(cluster, [])
        faults.append(ObjectStoreError(f"object {name[:12]} of cluster {cluster}: {error}"))
        return len(faults) >= _MAX_FAULTS

    def _stay(self) -> None:
        """Renew the lease, since objects may take long. Raises StoreRefused if another process leads now."""
        if not self._local.lead():
            raise StoreRefused("another process exchanges with other clusters by now")

    def _reject(self, cluster: str, name: str, error: FormatError) -> None:
        self.counters.rejected_objects += 1
        log.log(
            logging.WARNING if self.counters.rejected_objects == 1 else logging.DEBUG,
            "object %s of cluster %s is left out: %s",
            name[:12],
            cluster,
            error,
        )

    def _gauge(self, state: RegionsState) -> None:
        now_s = self._local.now_ms() // 1000
        entries = [entry for held in state.held.values() for entry in _entries(held)]
        self.gauges = RegionGauges(
            clusters=len(state.listings),
            segments=len(entries),
            bytes=sum(entry.num_bytes for entry in entries),
            lag_s=max((max(0, now_s - listing.time_s) for listing in state.listings.values()), default=0),
        )


def _without_purges(listing: Listing) -> Listing:
    return msgspec.structs.replace(listing, purged={})


def _entries(held: Held) -> list[SegmentEntry]:
    """Oldest first, each once."""
    found = {entry.digest: entry for entry in held.values() if entry is not None}
    return sorted(found.values(), key=lambda entry: (entry.last_s, entry.digest))
