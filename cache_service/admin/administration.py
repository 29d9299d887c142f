"""Administration of the shared cache's namespaces. All actions are audited, except those that only read counts."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cache_service.admin.audit_log import AuditLog
from cache_service.admin.importer import Importer, ImportResult
from cache_service.admin.namespace_contents import Contents, read_contents
from cache_service.admin.purge import Purge, PurgeResult, unknown
from cache_service.admin.verification import Verification, Verifier
from cache_service.errors import FormatError, NamespaceBusy, NamespaceUnknown, NamespaceUnread, StoreRefused
from cache_service.formats.documents import Piece
from cache_service.formats.earnings import Earnings
from cache_service.formats.frame import FrameCodec
from cache_service.formats.key_ring import KeyRing
from cache_service.formats.manifest import Manifest
from cache_service.formats.namespaces import PUBLIC, REGIONS
from cache_service.formats.purged_times import TimeRange
from cache_service.formats.store_keys import StoreKeys
from cache_service.index.index_files import IndexFiles, index_name
from cache_service.log.compactor import Compactor, CompactorSettings
from cache_service.log.fold_plan import FoldLimits
from cache_service.log.tenant_share import leave_tenants
from cache_service.promotion.promotion_gate import PromotionGate, PromotionTerms, nothing_blocked
from cache_service.regions.local_store import STATE_AREA, decode_state
from cache_service.store.admin_store import AdminStore, known_keys
from cache_service.store.connection import Connection
from cache_service.store.server_disk import forget_deleted
from cache_service.store.store import KEEP_S

_WITHDRAWALS = 5  # attempts while others write batches

IMPORT_KEEP_S = 365 * 24 * 3600
"""Time to live of imports after the last write: unlike traffic, they do not return by themselves."""

# Kinds of keys without content: of writers, compactors, purges, routers and the promotion gate.
_BOOKKEEPING = frozenset({"epoch", "lease", "fence", "purges", "earnings", "left"})
_REGIONS_STATE = f"{STATE_AREA}:manifest"


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    """What is known of a namespace without reading its data."""

    fingerprint: str
    namespace: str
    keys: int  # in Redis
    memory_bytes: int  # in the server
    expires_in_s: int | None  # if it is not written to; None: never


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """Contents and hit statistics of a namespace."""

    fingerprint: str
    namespace: str
    memory_bytes: int  # in the server
    expires_in_s: int | None
    epoch: str | None
    manifest_version: int
    generations: int
    segments: int
    segment_bytes: int
    log_entries: int
    documents: int
    phrases: int  # consecutive pieces of documents
    tokens: int
    first_s: int | None  # Unix time of the last addition to the oldest phrase
    last_s: int | None
    unread: int  # as `FoldedLogCounters` counts
    earnings: Earnings


@dataclass(frozen=True, slots=True)
class RegionStatus:
    """What a cluster shares, as this one knows."""

    fingerprint: str
    cluster: str
    is_own: bool
    age_s: int  # since it wrote its listing, by its own clock
    segments: int
    bytes: int
    imported_segments: int  # those of them that are readable here


@dataclass(frozen=True, slots=True)
class CompactResult:
    """What was folded. is_busy: another process compacts the namespace, so nothing was done."""

    fingerprint: str
    namespace: str
    is_busy: bool
    folds: int
    folded_entries: int
    trimmed_entries: int
    dropped_generations: int
    damaged_entries: int
    lost_segments: int


class CacheAdministration:
    """Administers one Redis. Thread-safe; actions on one namespace take turns by its lease.

    Methods raise StoreError, AuditError and NamespaceError; NamespaceUnknown for a namespace that does not exist.
    """

    def __init__(
        self,
        connection: Connection,
        ring: KeyRing | None = None,
        audit: AuditLog | None = None,
        limits: FoldLimits | None = None,
        actor: str = "",
        index_directory: Path | None = None,
        owns_server: bool = False,
    ) -> None:
        """limits: budgets of a namespace, for imports and compactions. actor: who acts, for the audit log.
        index_directory: index files of this machine's routers, which purges remove; None: there are none.
        owns_server: Redis is the cluster's own, see `clean_disk`."""
        self._connection = connection
        self._ring = ring
        self._audit = audit
        self._limits = limits or FoldLimits()
        self._actor = actor
        self._index_directory = index_directory
        self._owns_server = owns_server

    def acting_for(self, actor: str) -> CacheAdministration:
        """The same with another actor."""
        acting = copy(self)
        acting._actor = actor
        return acting

    def find(self, namespace: str, fingerprint: str | None = None) -> list[StoreKeys]:
        """Namespaces with this name, of one fingerprint or any. Raises NamespaceUnknown if there is none."""
        found = {
            keys
            for keys, kind in known_keys(self._connection)
            if keys.namespace == namespace and fingerprint in (None, keys.fingerprint) and _has_content([kind])
        }
        if not found:
            of = f" of model {fingerprint!r}" if fingerprint is not None else ""
            raise NamespaceUnknown(f"there is no namespace {namespace!r}{of} in the cache")
        return sorted(found, key=lambda keys: keys.fingerprint)

    def namespaces(self, fingerprint: str | None = None) -> list[NamespaceSummary]:
        """All namespaces, of one fingerprint or any, in order of fingerprint and name."""
        kinds: dict[StoreKeys, list[str]] = {}
        for keys, kind in known_keys(self._connection):
            if fingerprint in (None, keys.fingerprint):
                kinds.setdefault(keys, []).append(kind)
        summaries = []
        for keys in sorted(kinds, key=lambda keys: (keys.fingerprint, keys.namespace)):
            if _has_content(kinds[keys]):
                summaries.append(self._summary(keys, kinds[keys]))
        return summaries

    def regions(self) -> list[RegionStatus]:
        """Clusters that share with this one, and itself first, of every model. Scans the whole server."""
        found = {
            keys for keys, kind in known_keys(self._connection) if (keys.namespace, kind) == (REGIONS, _REGIONS_STATE)
        }
        return [
            status for keys in sorted(found, key=lambda keys: keys.fingerprint) for status in self._regions_of(keys)
        ]

    def stats(self, keys: StoreKeys) -> NamespaceStats:
        """Reads the whole namespace."""
        store, codec = self._opened(keys)
        summary = self._summary(keys, self._require(store))
        stored = store.read_manifest()
        generations = segments = segment_bytes = 0
        try:
            if stored.frame is not None:
                manifest = Manifest.decode(codec, stored.frame)
                generations, segments = len(manifest.generations), len(manifest.segments)
                segment_bytes = sum(generation.num_bytes for generation in manifest.generations)
        except FormatError:
            pass  # `contents.unread` counts it
        contents = read_contents(store, codec)
        pieces = contents.pieces
        times = [piece.time_s for piece in pieces]
        return NamespaceStats(
            fingerprint=keys.fingerprint,
            namespace=keys.namespace,
            memory_bytes=summary.memory_bytes,
            expires_in_s=summary.expires_in_s,
            epoch=stored.epoch,
            manifest_version=stored.version,
            generations=generations,
            segments=segments,
            segment_bytes=segment_bytes,
            log_entries=store.log_length(),
            documents=len({piece.document_id for piece in pieces}),
            phrases=len(pieces),
            tokens=sum(len(piece.token_ids) for piece in pieces),
            first_s=min(times, default=None),
            last_s=max(times, default=None),
            unread=contents.unread,
            earnings=store.read_earnings(),
        )

    def import_documents(
        self, keys: StoreKeys, documents: Iterable[Piece], keep_s: int = IMPORT_KEEP_S
    ) -> ImportResult:
        """Add pieces of documents that are not there yet. If `documents` raises or the process is interrupted, what was
        imported stays, and repeating the import completes it. keep_s: time to live after the last write."""
        with self._action("import", keys) as figures:
            store, codec = self._opened(keys)
            compactor = Compactor(store, codec, CompactorSettings(limits=self._limits, keep_s=keep_s))
            importer = Importer(store, codec, compactor, keep_s=keep_s)
            try:
                return importer.run(documents)
            finally:
                figures |= asdict(importer.result)

    def export(self, keys: StoreKeys) -> Contents:
        """Everything that can be read. Raises NamespaceUnread if there is something but nothing can be read."""
        with self._action("export", keys) as figures:
            store, codec = self._opened(keys)
            self._require(store)
            contents = read_contents(store, codec)
            num_tokens = sum(len(piece.token_ids) for piece in contents.pieces)
            figures |= {"phrases": len(contents.pieces), "tokens": num_tokens, "unread": contents.unread}
            if contents.unread and not contents.pieces:
                raise NamespaceUnread(
                    f"nothing in namespace {keys.namespace} can be read, none of {contents.unread} objects: is it "
                    "encrypted, and its key not here?"
                )
            return contents

    def purge(self, keys: StoreKeys, times: TimeRange | None = None) -> PurgeResult:
        """Remove what was learnt in a time range, or everything: from Redis, from followers at their next look, and
        from index files on this machine."""
        times = times or TimeRange()
        told = {} if times.is_all else {"since_s": times.since_s, "until_s": times.until_s}
        with self._action("purge", keys, **told) as figures:
            store, codec = self._opened(keys)
            purge = Purge(store, codec, _keep_s(store))
            try:
                result = purge.everything() if times.is_all else purge.learnt_in(times)
                if times.is_all:
                    with suppress(StoreRefused):  # no permission; the sets' entries expire
                        leave_tenants(self._connection, keys)
            finally:
                self._remove_indexes(keys)
            figures |= {"keys": result.keys, "tokens": result.tokens}
            return result

    def clean_disk(self) -> bool:
        """Have the cluster's own server rewrite its files without purged data; other servers are left to their
        operators. False: as in `forget_deleted`."""
        return not self._owns_server or forget_deleted(self._connection)

    def withdraw(
        self,
        organisations: Collection[str],
        terms: PromotionTerms,
        fingerprint: str | None = None,
        *,
        erases: bool = False,
    ) -> list[StoreKeys]:
        """Remove the organisations' support from the public pools, of one fingerprint or any. Phrases that lose the
        support they need leave the pools at once. Organisations among terms.members may support phrases again with
        later answers, also those that had opted out before; the others stay out. erases: also delete the hashes of
        their phrases.

        Returns the existing pools. Raises NamespaceBusy for a pool that others keep writing.
        """
        try:
            pools = self.find(PUBLIC, fingerprint)
        except NamespaceUnknown:
            return []
        for keys in pools:
            with self._action("withdraw", keys, organisations=len(organisations)) as figures:
                store, codec = self._opened(keys)
                gate = PromotionGate(store, codec, terms.secret, nothing_blocked, policy=terms.policy)
                gate.admit(terms.members)
                for organisation in organisations:
                    gate.opt_out(organisation)
                    if organisation in terms.members:
                        gate.opt_in(organisation)
                figures["revoked"] = _revoke(gate) if organisations else 0
                if erases:
                    gate.erase(organisations)
        return pools

    def compact(self, keys: StoreKeys) -> CompactResult:
        """Fold the whole log, unless another process compacts it."""
        with self._action("compact", keys) as figures:
            store, codec = self._opened(keys)
            self._require(store)
            compactor = Compactor(store, codec, CompactorSettings(limits=self._limits, keep_s=_keep_s(store)))
            counters, owner = compactor.counters, secrets.token_hex(16)
            is_busy = store.acquire_lease(owner, 1000) is None
            if not is_busy:
                store.release_lease(owner)
                while compactor.fold():
                    pass  # a fold takes a bounded part of the log
                compactor.release()
            figures |= {"folds": counters.folds, "is_busy": is_busy}
            return CompactResult(
                fingerprint=keys.fingerprint,
                namespace=keys.namespace,
                is_busy=is_busy,
                folds=counters.folds,
                folded_entries=counters.folded_entries,
                trimmed_entries=counters.trimmed_entries,
                dropped_generations=counters.dropped_generations,
                damaged_entries=counters.corrupt_entries,
                lost_segments=counters.lost_segments,
            )

    def verify(self, keys: StoreKeys) -> Verification:
        with self._action("verify", keys) as figures:
            store, codec = self._opened(keys)
            self._require(store)
            result = Verifier(store, codec).run()
            figures |= {"objects": result.objects, "problems": len(result.problems)}
            return result

    def _regions_of(self, keys: StoreKeys) -> list[RegionStatus]:
        store, codec = self._opened(keys)
        now_s = store.server_time_ms() // 1000
        try:
            state = decode_state(codec, store.beside(STATE_AREA).read_manifest())
        except FormatError as error:
            raise NamespaceUnread(f"what is known of other clusters cannot be read: {error}") from None
        if state is None:
            return []
        held = {digest for known in state.held.values() for digest, entry in known.items() if entry is not None}
        return [
            RegionStatus(
                fingerprint=keys.fingerprint,
                cluster=listing.cluster,
                is_own=listing is state.own,
                age_s=max(0, now_s - listing.time_s),
                segments=listing.num_segments,
                bytes=listing.num_bytes,
                imported_segments=sum(ref.digest in held for refs in listing.shares.values() for ref in refs),
            )
            for listing in (*([] if state.own is None else [state.own]), *state.listings.values())
        ]

    def _remove_indexes(self, keys: StoreKeys) -> None:
        """Remove index files of this machine. Processes that use one keep it until their next check, then rebuild
        it."""
        if self._index_directory is not None and self._index_directory.is_dir():
            IndexFiles(self._index_directory).keep(index_name(keys), None)

    def _opened(self, keys: StoreKeys) -> tuple[AdminStore, FrameCodec]:
        return AdminStore(self._connection, keys), FrameCodec(keys, self._ring)

    def _require(self, store: AdminStore) -> list[str]:
        """Kinds of the namespace's keys. Raises NamespaceUnknown."""
        kinds = store.kinds()
        if not _has_content(kinds):
            raise unknown(store.keys)
        return kinds

    def _summary(self, keys: StoreKeys, kinds: list[str]) -> NamespaceSummary:
        store = AdminStore(self._connection, keys)
        lives = [store.ttl_s(kind) for kind in ("epoch", "log", "manifest")]
        there = [seconds for seconds in lives if seconds is not None and seconds >= 0]
        return NamespaceSummary(
            fingerprint=keys.fingerprint,
            namespace=keys.namespace,
            keys=len(kinds),
            memory_bytes=sum(store.memory_bytes(kind) for kind in kinds),
            expires_in_s=max(there) if there and None not in lives else None,
        )

    def _action(self, action: str, keys: StoreKeys, **fields: int) -> AbstractContextManager[dict[str, Any]]:
        if self._audit is None:
            return nullcontext({})
        told = {"fingerprint": keys.fingerprint, "namespace": keys.namespace, **fields}
        return self._audit.action(self._actor, action, **told)


def _revoke(gate: PromotionGate) -> int:
    """Number of revoked phrases."""
    before = gate.public()
    for _ in range(_WITHDRAWALS):
        if gate.revoke(seizes=True) or not gate.public():
            return len(before - gate.public())
    raise NamespaceBusy("others keep writing the public pool; try again")


def _has_content(kinds: list[str]) -> bool:
    """Whether any of the keys, in any area ("soft-3:log"), holds learnt data."""
    return any(kind != _REGIONS_STATE and kind.rpartition(":")[2] not in _BOOKKEEPING for kind in kinds)


def _keep_s(store: AdminStore) -> int:
    """The namespace's remaining time to live, for what is rewritten."""
    left_s = store.ttl_s("epoch")
    return left_s if left_s is not None and left_s > 0 else KEEP_S
