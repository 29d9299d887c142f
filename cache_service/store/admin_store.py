"""Redis operations of administrators on one namespace: scan its keys, seize its lease, end its epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import redis.exceptions as redis_errors

from cache_service.errors import StoreUnavailable
from cache_service.formats.earnings import Earnings
from cache_service.formats.purged_times import PurgedTimes, TimeRange
from cache_service.formats.store_keys import StoreKeys, parse_key
from cache_service.formats.stream_id import START, parse_id
from cache_service.store.answers import as_bytes, as_count, as_optional_text, faults_told
from cache_service.store.connection import Connection
from cache_service.store.scripts import DROP_ALL, END_LEASE, REPLACE_ALL
from cache_service.store.store import KEEP_S, VERDICTS, Store, Verdict

_SCAN_COUNT = 1000
_DELETED_AT_ONCE = 100
_NOTE_TRIES = 16


def known_keys(connection: Connection, keys: StoreKeys | None = None) -> Iterator[tuple[StoreKeys, str]]:
    """Keys of the shared cache, or of one namespace, as (namespace, kind), each once. Scans the whole server. Raises
    StoreError."""
    seen = set()
    with faults_told():
        for name in connection.client().scan_iter(match="sd:{*" if keys is None else keys.key("*"), count=_SCAN_COUNT):
            if name in seen:
                continue
            seen.add(name)
            parsed = parse_key(as_bytes(name))
            if parsed is not None and keys in (None, parsed[0]):
                yield parsed


class AdminStore(Store):
    """One namespace in Redis. Every method raises StoreUnavailable or StoreRefused, nothing else."""

    def kinds(self) -> list[str]:
        """Kinds of the namespace's keys in all areas: "log", "segment:...", "soft-3:log". Scans the whole server."""
        return sorted(kind for _, kind in known_keys(self.connection, self.keys.beside("")))

    def delete(self, kinds: Sequence[str]) -> int:
        """Returns the number of keys that existed."""
        num_deleted = 0
        with faults_told():
            for begin in range(0, len(kinds), _DELETED_AT_ONCE):
                with self.client().pipeline(transaction=False) as pipeline:
                    for kind in kinds[begin : begin + _DELETED_AT_ONCE]:
                        pipeline.delete(self.keys.key(kind))
                    num_deleted += sum(map(as_count, pipeline.execute()))
        return num_deleted

    def memory_bytes(self, kind: str) -> int:
        """Memory of a key as the server reports it; 0 if it does not exist."""
        with faults_told():
            return as_count(self.client().memory_usage(self.keys.key(kind), samples=0) or 0)

    def ttl_s(self, kind: str) -> int | None:
        """Time to live of a key; -1: it does not exist, None: it never expires."""
        with faults_told():
            seconds = int(self.client().ttl(self.keys.key(kind)))
            return None if seconds == -1 else max(seconds, -1)

    def log_length(self) -> int:
        """Entries in the log, including folded ones that are not trimmed yet."""
        with faults_told():
            return as_count(self.client().xlen(self.keys.log))

    def folded_id(self) -> str:
        """Id of the last entry folded into segments."""
        with faults_told():
            found = as_optional_text(self.client().hget(self.keys.manifest, "folded")) or START
            parse_id(found)
            return found

    def hash_fields(self, kind: str) -> Iterator[tuple[bytes, bytes]]:
        """Fields of a hash and their values. Fields written meanwhile may be missing."""
        with faults_told():
            for field, value in self.client().hscan_iter(self.keys.key(kind), count=_SCAN_COUNT):
                yield as_bytes(field), as_bytes(value)

    def end_lease(self, owner: str) -> bool:
        """Delete lease and fence, so that a purge leaves nothing. False: the lease was lost."""
        with faults_told():
            return as_count(self.run(END_LEASE, [self.keys.lease, self.keys.fence], [owner])) > 0

    def note_purge(self, purged: TimeRange, keep_s: int) -> PurgedTimes:
        """Note a purged range for writers, for `keep_s` seconds; returns all noted ranges. A damaged note is replaced.

        Raises StoreUnavailable if other purges keep interfering.
        """
        with faults_told(), self.client().pipeline(transaction=True) as pipeline:
            for _ in range(_NOTE_TRIES):
                pipeline.watch(self.keys.purges)
                noted = self._noted_purges(pipeline).and_also(purged)
                pipeline.multi()
                pipeline.set(self.keys.purges, noted.encode(), ex=keep_s)
                with suppress(redis_errors.WatchError):  # another purge at the same time
                    pipeline.execute()
                    return noted
        raise StoreUnavailable(
            f"namespace {self.keys.namespace}: other purges interfered {_NOTE_TRIES} times; try again"
        )

    def noted_purges(self) -> PurgedTimes:
        """What was purged lately."""
        with faults_told():
            return self._noted_purges(self.client())

    def _noted_purges(self, client: Any) -> PurgedTimes:
        try:
            return PurgedTimes.decode(as_bytes(client.get(self.keys.purges) or b""))
        except (redis_errors.ResponseError, ValueError):  # ResponseError: the key is no string
            return PurgedTimes()

    def drop_all(self, token: int) -> int | None:
        """Delete epoch, manifest and log, so that readers forget what they know.

        Returns the number of keys that existed; None: a newer lease has been granted.
        """
        keys = [self.keys.manifest, self.keys.fence, self.keys.epoch, self.keys.log]
        with faults_told():
            num_keys = int(self.run(DROP_ALL, keys, [token]))
            return None if num_keys == -1 else as_count(num_keys)

    def replace_all(
        self, frame: bytes, token: int, epoch: str, replaces: int, new_epoch: str, last_id: str, keep_s: int = KEEP_S
    ) -> Verdict:
        """Begin `new_epoch` with a new manifest and the log after `last_id`; refused after a newer lease, epoch or
        manifest."""
        keys = [self.keys.manifest, self.keys.fence, self.keys.epoch, self.keys.log]
        arguments = [token, epoch, replaces, replaces + 1, last_id, frame, keep_s, new_epoch]
        with faults_told():
            return VERDICTS[self.run(REPLACE_ALL, keys, arguments)]

    def add_earnings(self, earnings: Earnings, keep_s: int = KEEP_S) -> None:
        with faults_told(), self.client().pipeline(transaction=True) as pipeline:
            for name, count in earnings.counts().items():
                pipeline.hincrby(self.keys.earnings, name, count)
            pipeline.expire(self.keys.earnings, keep_s)
            pipeline.execute()

    def read_earnings(self) -> Earnings:
        with faults_told():
            found = self.client().hgetall(self.keys.earnings)
            return Earnings(**{name: as_count(found.get(name.encode(), 0)) for name in Earnings().counts()})
