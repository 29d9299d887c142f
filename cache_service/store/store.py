"""Redis operations on one namespace, as typed calls. Malformed answers count as an unavailable server."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from redis.exceptions import WatchError

from cache_service.errors import NamespacePurged, StoreUnavailable
from cache_service.formats.folded_manifest import MAX_MANIFEST_BYTES
from cache_service.formats.frame import FRAME_OVERHEAD, FrameCodec
from cache_service.formats.key_ring import SEAL_BYTES
from cache_service.formats.purged_times import PurgedTimes
from cache_service.formats.store_keys import StoreKeys
from cache_service.formats.stream_id import parse_id
from cache_service.store.answers import as_bytes, as_count, as_optional_text, as_text, faults_told, run_script
from cache_service.store.connection import Client, Connection
from cache_service.store.scripts import (
    ACQUIRE_LEASE,
    APPEND_IN_EPOCH,
    KEEP,
    RELEASE_LEASE,
    SEIZE_LEASE,
    SERVER_TIME,
    TRIM_LOG,
    WRITE_MANIFEST,
    WRITE_SEGMENT,
    Script,
)

_FIELD = b"e"
_KEPT_AT_ONCE = 255
_KEEP_ATTEMPTS = 8  # each failure means that another writer has just extended it
_MAX_MANIFEST_FRAME = MAX_MANIFEST_BYTES + FRAME_OVERHEAD + SEAL_BYTES

KEEP_S = 7 * 24 * 3600
"""Default time to live of a namespace after its last write. All keys expire, so a full server with the policy
volatile-lfu may evict any of them."""

Verdict = Literal["ok", "fenced", "epoch", "version"]
VERDICTS: dict[bytes, Verdict] = {b"ok": "ok", b"fenced": "fenced", b"epoch": "epoch", b"version": "version"}


@dataclass(frozen=True, slots=True)
class LogView:
    """Part of the log, with epoch and manifest version of the same moment."""

    epoch: str | None  # None: nothing has been written yet
    version: int  # the manifest's, 0 if there is none
    entries: list[tuple[str, bytes]]  # (stream id, frame), in order

    def after(self, entry_id: str) -> list[tuple[str, bytes]]:
        """Entries after `entry_id`, from which the log was read."""
        return self.entries[1:] if self.entries and self.entries[0][0] == entry_id else self.entries


@dataclass(frozen=True, slots=True)
class StoredManifest:
    epoch: str | None
    version: int
    frame: bytes | None  # None: there is none, or it is too large


OpenNamespace = Callable[[str], "tuple[Store, FrameCodec]"]
"""Returns the store and a new codec of a namespace, without contacting the store. Raises SettingError."""


class Store:
    """One namespace in Redis. Every method raises StoreUnavailable or StoreRefused, nothing else."""

    def __init__(self, connection: Connection, keys: StoreKeys) -> None:
        self.keys = keys
        self.connection = connection
        self._lease = keys.lease

    def beside(self, area: str) -> Store:
        return Store(self.connection, self.keys.beside(area))

    def append(
        self,
        frames: Sequence[bytes],
        max_entries: int,
        keep_s: int = KEEP_S,
        purges: bytes | None = None,
        epoch: str | None = None,
    ) -> list[str]:
        """Append entries to the log, all or none, and return their ids. Begins an epoch if there is none.

        The log is trimmed to about the newest `max_entries`, and lives at least `keep_s` seconds from now.
        purges: the noted purges that the entries respect, as read before (b"": none); None: do not check. epoch: the
        one that the entries are for; None: any. Raises NamespacePurged, and writes nothing, if either has changed.
        """
        with faults_told(), self.client().pipeline(transaction=True) as pipeline:
            if purges is not None:
                pipeline.watch(self.keys.purges)
                found = as_bytes(pipeline.get(self.keys.purges) or b"")
                # The epoch is not watched, since every append extends its life. A purge notes itself before it ends it.
                current = as_optional_text(pipeline.get(self.keys.epoch))
                if found != purges or epoch not in (None, current):
                    raise NamespacePurged(PurgedTimes.decode(found).encode(), current)
                pipeline.multi()
            pipeline.set(self.keys.epoch, secrets.token_hex(16), nx=True, ex=keep_s)
            for frame in frames:
                pipeline.xadd(self.keys.log, {_FIELD: frame}, maxlen=max_entries, approximate=True)
            pipeline.expire(self.keys.log, keep_s)  # in this transaction: this process may die before `_keep`
            entry_ids = [as_text(answer) for answer in pipeline.execute()[1:-1]]
        self._keep(keep_s)
        return entry_ids

    def append_in_epoch(self, epoch: str, frame: bytes, max_entries: int, keep_s: int = KEEP_S) -> str | None:
        """Append an entry unless the epoch has changed. Returns its id, or None. The log keeps about `max_entries`."""
        with faults_told():
            answer = as_text(
                self.run(APPEND_IN_EPOCH, [self.keys.log, self.keys.epoch], [epoch, frame, max_entries, keep_s])
            )
            if answer:
                parse_id(answer)
            return answer or None

    def read_log(self, begin: str, max_entries: int) -> LogView:
        """Entries from id `begin` on, inclusive."""
        with faults_told(), self.client().pipeline(transaction=True) as pipeline:
            pipeline.get(self.keys.epoch)
            pipeline.hget(self.keys.manifest, "version")
            pipeline.xrange(self.keys.log, begin, "+", max_entries)
            return log_view(begin, *pipeline.execute())

    def log_after(self, entry_id: str, at_once: int) -> Iterator[tuple[str, bytes]]:
        """Entries after this one, read in batches of `at_once`."""
        while entries := self.read_log(entry_id, at_once + 1).after(entry_id):
            yield from entries
            entry_id = entries[-1][0]

    def read_manifest(self) -> StoredManifest:
        with faults_told():
            client = self.client()
            size = as_count(client.hstrlen(self.keys.manifest, "body"))
            with client.pipeline(transaction=True) as pipeline:
                pipeline.get(self.keys.epoch)
                pipeline.hget(self.keys.manifest, "version")
                if 0 < size <= _MAX_MANIFEST_FRAME:
                    pipeline.hget(self.keys.manifest, "body")
                epoch, version, *body = pipeline.execute()
            return StoredManifest(as_optional_text(epoch), as_count(version or 0), as_bytes(body[0]) if body else None)

    def server_time_ms(self) -> int:
        """The server's Unix time, a clock that all processes share."""
        with faults_told():
            return as_count(self.run(SERVER_TIME, [self.keys.epoch], []))

    def read_epoch(self) -> str | None:
        """None: nothing has been written yet, or the namespace has expired."""
        with faults_told():
            return as_optional_text(self.client().get(self.keys.epoch))

    def begin_epoch(self, keep_s: int = KEEP_S) -> str:
        """The current epoch; a new one if there is none."""
        with faults_told(), self.client().pipeline(transaction=True) as pipeline:
            pipeline.set(self.keys.epoch, secrets.token_hex(16), nx=True, ex=keep_s)
            pipeline.get(self.keys.epoch)
            return as_text(pipeline.execute()[1])

    def read_segment(self, digest: str, num_bytes: int) -> bytes | None:
        """At most `num_bytes` + 1 bytes; None if it does not exist."""
        with faults_told():
            return as_bytes(self.client().getrange(self.keys.segment(digest), 0, num_bytes)) or None

    def write_segment(self, digest: str, frame: bytes, keep_s: int, token: int, epoch: str) -> bool:
        """Write a segment under a lease. False: a newer lease was granted, or the epoch has changed."""
        keys = [self.keys.segment(digest), self.keys.fence, self.keys.epoch]
        with faults_told():
            return as_count(self.run(WRITE_SEGMENT, keys, [token, epoch, keep_s, frame])) > 0

    def keep_live_segments(self, digests: Sequence[str], keep_s: int) -> int:
        """Extend segments to `keep_s` seconds or the namespace's life, whichever is longer. Returns how many exist."""
        num_found = 0
        with faults_told():
            for begin in range(0, len(digests), _KEPT_AT_ONCE):
                names = [self.keys.segment(digest) for digest in digests[begin : begin + _KEPT_AT_ONCE]]
                num_found += as_count(self.run(KEEP, [self.keys.epoch, *names], [keep_s]))
        return num_found

    def keep_manifest(self, keep_s: int) -> None:
        """Extend epoch and manifest to `keep_s` seconds, without shortening the epoch."""
        with faults_told():
            self.run(KEEP, [self.keys.epoch, self.keys.manifest], [keep_s])

    def keep_segments(self, digests: Sequence[str], keep_s: int) -> int:
        """Set the time to live of segments. Returns how many exist."""
        with faults_told(), self.client().pipeline(transaction=False) as pipeline:
            for digest in digests:
                pipeline.expire(self.keys.segment(digest), keep_s)
            return sum(map(as_count, pipeline.execute()))

    def acquire_lease(self, owner: str, lease_ms: int, keep_s: int = KEEP_S) -> int | None:
        """Acquire or renew the lease. Returns its fencing token; None if another owner holds it."""
        with faults_told():
            keys = [self._lease, self.keys.fence, self.keys.manifest]
            return as_count(self.run(ACQUIRE_LEASE, keys, [owner, lease_ms, keep_s])) or None

    def seize_lease(self, owner: str, lease_ms: int, keep_s: int = KEEP_S) -> int:
        """Take the lease from any holder and return its fencing token; no other holder can write from then on."""
        with faults_told():
            keys = [self._lease, self.keys.fence, self.keys.manifest]
            return as_count(self.run(SEIZE_LEASE, keys, [owner, lease_ms, keep_s]))

    def release_lease(self, owner: str) -> None:
        with faults_told():
            self.run(RELEASE_LEASE, [self._lease], [owner])

    def write_manifest(
        self,
        frame: bytes,
        token: int,
        epoch: str,
        replaces: int,
        version: int,
        folded_id: str,
        keep_s: int = KEEP_S,
    ) -> Verdict:
        """Replace manifest version `replaces` with `version`; refused after a newer lease, epoch or manifest."""
        arguments = [token, epoch, replaces, version, folded_id, frame, keep_s]
        with faults_told():
            return VERDICTS[self.run(WRITE_MANIFEST, [self.keys.manifest, self.keys.fence, self.keys.epoch], arguments)]

    def trim_log(self, version: int, first_id: str) -> int:
        """Remove the entries before `first_id` if the manifest still has `version`. Returns how many."""
        with faults_told():
            return as_count(self.run(TRIM_LOG, [self.keys.log, self.keys.manifest], [version, first_id]))

    def _keep(self, keep_s: int) -> None:
        """Extend log and epoch to `keep_s` seconds, without shortening the epoch. No script: writers may lack that
        permission."""
        for _ in range(_KEEP_ATTEMPTS):
            with faults_told(), suppress(WatchError), self.client().pipeline(transaction=True) as pipeline:
                pipeline.watch(self.keys.epoch)
                left_s = int(pipeline.ttl(self.keys.epoch))
                pipeline.multi()
                if left_s < keep_s:
                    pipeline.expire(self.keys.epoch, keep_s)
                pipeline.expire(self.keys.log, max(left_s, keep_s))
                pipeline.execute()
                return

    def client(self) -> Client:
        """Use it within `faults_told`."""
        return self.connection.client()

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        """Run a script on keys of the namespace. Use it within `faults_told`."""
        return run_script(self.client(), script, keys, arguments)


def log_view(begin: str, epoch: Any, version: Any, found: Any) -> LogView:
    """The server's answers about a log from `begin` on, checked. Use it within `faults_told`."""
    entries = [_entry(entry) for entry in found]
    ids = [parse_id(entry_id) for entry_id, _ in entries]
    if ids != sorted(set(ids)) or (ids and ids[0] < parse_id(begin)):
        raise StoreUnavailable("Redis answers nonsense: entries of a log out of order")
    return LogView(as_optional_text(epoch), as_count(version or 0), entries)


def _entry(entry: Any) -> tuple[str, bytes]:
    entry_id, fields = entry
    if isinstance(fields, list):  # the server's form, which redis-py leaves in a cluster transaction
        fields = dict(zip(fields[::2], fields[1::2], strict=True))
    found = fields.get(_FIELD, b"") if fields else b""  # an entry with other fields is damaged
    return as_text(entry_id), as_bytes(found)
