"""The write path of the shared cache: verified tokens go into a bounded queue, and a thread writes them to Redis.

`publish` neither waits for the network nor raises, in any state of Redis. What cannot be written is dropped,
oldest first, and counted.

Pieces carry the server's time, so that a wrong local clock cannot make them escape a purge. When an epoch ends, queued
tokens are written to the next one only if a new purge is noted that does not cover them, or if they are younger than a
second: a note may be evicted, but hardly within a second.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from cache_service.errors import NamespacePurged, SettingError, StoreError, StoreRefused
from cache_service.formats.documents import (
    DOCUMENT_ID_BYTES,
    MAX_DOCUMENT_TOKENS,
    Int32Array,
    Piece,
    RecordKind,
    assemble,
    split_pieces,
)
from cache_service.formats.entry_codec import MAX_ENTRY_PIECES, MAX_ENTRY_TOKENS, encode_entry
from cache_service.formats.frame import FrameCodec
from cache_service.formats.namespaces import PUBLIC
from cache_service.formats.purged_times import PurgedTimes
from cache_service.options import KeepSeconds, Options, PollSeconds
from cache_service.store.circuit_breaker import CircuitBreaker
from cache_service.store.store import KEEP_S, OpenNamespace, Store

log = logging.getLogger(__name__)

_FRAMES_AT_ONCE = 64
_MAX_NAMESPACES = 4096  # held open
_NOTED_MS = 1000  # a noted purge stays at least this long, even if memory is short
_CLOCK_S = 30.0  # between readings of the server's time


class PublisherSettings(Options):
    """Limits of the write path."""

    max_queued_tokens: Annotated[int, Field(ge=1, le=2**31)] = 1_000_000
    max_queued_pieces: Annotated[int, Field(ge=1, le=2**31)] = 100_000
    entry_tokens: Annotated[int, Field(ge=1, le=MAX_ENTRY_TOKENS)] = 1024  # most tokens per entry
    flush_s: PollSeconds = 0.25  # longest wait from publishing to writing
    max_log_entries: Annotated[int, Field(ge=1, le=2**31)] = 16_384  # kept in the stream of a namespace
    keep_s: KeepSeconds = KEEP_S  # time to live of a stream after its last entry


@dataclass(slots=True)
class PublisherCounters:
    """Counts since the start."""

    published_tokens: int = 0  # accepted by `publish`
    written_tokens: int = 0
    written_bytes: int = 0
    overflow_tokens: int = 0  # dropped because the queue was full
    refused_tokens: int = 0  # dropped because Redis refused them: full, read-only, not permitted
    purged_tokens: int = 0  # dropped because their time was purged
    invalid_pieces: int = 0  # dropped because no entry can hold them
    failures: int = 0  # attempts with Redis unavailable
    breaker_opened: int = 0
    faults: int = 0  # unexpected exceptions: each one is a bug


class _Waiting(NamedTuple):
    """Arguments of `publish`, unchecked."""

    namespace: str
    document_id: bytes
    offset: int
    token_ids: tuple[int, ...] | Int32Array
    kind: int
    at_ms: int  # this process's monotonic clock


@dataclass(slots=True)
class _Opened:
    """A namespace being written."""

    store: Store
    codec: FrameCodec
    ahead_s: float  # server's Unix time minus this process's monotonic clock
    asked_s: float  # when the server's time was read
    epoch: str
    purges: bytes = b""  # as last read
    from_ms: int = 0  # older tokens belong to an ended epoch

    def time_s(self, at_ms: int) -> int:
        return max(0, int(self.ahead_s + at_ms / 1000))


@dataclass(slots=True)
class _Run:
    """Consecutive tokens of one document."""

    namespace: str
    document_id: bytes
    kind: int
    offset: int
    tokens: array[int]
    at_ms: int


class Publisher:
    """Publishes for any number of namespaces, in one background thread, which also calls `open_namespace`."""

    def __init__(
        self,
        open_namespace: OpenNamespace,
        settings: PublisherSettings | None = None,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self.counters = PublisherCounters()
        self._settings = settings or PublisherSettings()
        self._open_namespace = open_namespace
        self._breaker = breaker or CircuitBreaker()
        self._namespaces: dict[str, _Opened] = {}
        self._lock = threading.Lock()
        self._queue: deque[_Waiting] = deque()
        self._queued_tokens = 0
        self._taken_tokens = 0  # tokens that the thread is writing or will retry
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache-publisher", daemon=True)
        self._thread.start()

    def publish(
        self,
        namespace: str,
        document_id: bytes,
        offset: int,
        token_ids: Sequence[int] | Int32Array,
        kind: int = RecordKind.OUTPUT,
    ) -> None:
        """Share `token_ids` ([n], copied) at `offset` of a document. Returns at once and never raises.

        Invalid arguments are dropped and counted when they are written.
        """
        try:
            copied = token_ids.copy() if isinstance(token_ids, np.ndarray) else tuple(token_ids)
            num_tokens = len(copied)
        except Exception:  # a caller's mistake must not end its round
            self.counters.invalid_pieces += 1
            return
        with self._lock:
            if self._closing.is_set() or num_tokens == 0:
                return
            self.counters.published_tokens += num_tokens
            self._queue.append(_Waiting(namespace, document_id, offset, token_ids=copied, kind=kind, at_ms=_now_ms()))
            self._queued_tokens += num_tokens
            while self._queue and self._is_full():
                dropped = len(self._queue.popleft().token_ids)
                self._queued_tokens -= dropped
                self.counters.overflow_tokens += dropped
            is_batch = self._queued_tokens >= self._settings.entry_tokens
        if is_batch:
            self._wake.set()

    @property
    def queued_tokens(self) -> int:
        """Tokens not yet written, including those being written."""
        return self._queued_tokens + self._taken_tokens

    @property
    def is_breaker_open(self) -> bool:
        return self._breaker.is_open

    def close(self, timeout_s: float = 2.0) -> bool:
        """Write what is queued and end the thread. False if something is left after `timeout_s`."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self.queued_tokens == 0

    def _is_full(self) -> bool:
        settings = self._settings
        return self.queued_tokens > settings.max_queued_tokens or len(self._queue) > settings.max_queued_pieces

    def _run(self) -> None:
        held: list[tuple[str, Piece]] = []
        while True:
            is_last = self._closing.is_set()
            pause_s = self._breaker.wait_s(time.monotonic())
            if not pause_s or is_last:
                try:
                    held = self._write(held or self._take())
                except Exception:
                    log.exception("the publisher of the shared cache lost what it was writing")
                    self.counters.faults += 1
                    held = []
                self._taken_tokens = sum(len(piece.token_ids) for _, piece in held)
                if not held and self._queued_tokens >= (1 if is_last else self._settings.entry_tokens):
                    continue
            if is_last:
                return  # everything left has been tried once
            self._wait(pause_s or self._settings.flush_s, stuck=bool(held or pause_s))

    def _wait(self, seconds: float, stuck: bool) -> None:
        """Wait for a batch. stuck: Redis is away, so that only closing ends the wait early."""
        if stuck:
            self._closing.wait(seconds)
        else:
            self._wake.wait(seconds)
        self._wake.clear()

    def _take(self) -> list[tuple[str, Piece]]:
        """Take about as much as `_FRAMES_AT_ONCE` entries hold."""
        taken: list[_Waiting] = []
        room = _FRAMES_AT_ONCE * self._settings.entry_tokens
        with self._lock:
            while self._queue and room > 0:
                waiting = self._queue.popleft()
                num_tokens = len(waiting.token_ids)
                room -= num_tokens
                self._queued_tokens -= num_tokens
                self._taken_tokens += num_tokens
                taken.append(waiting)
        return self._join(taken)

    def _join(self, taken: list[_Waiting]) -> list[tuple[str, Piece]]:
        """Join consecutive tokens of each document into pieces. Until they are written, time_s of a piece is in
        milliseconds of this process's monotonic clock."""
        runs: list[_Run] = []
        newest: dict[tuple[str, bytes, int], _Run] = {}
        for waiting in taken:
            try:
                tokens = _checked_tokens(waiting)
                key = (waiting.namespace, waiting.document_id, waiting.kind)
                run = newest.get(key)
            except Exception:  # invalid arguments of `publish`
                self.counters.invalid_pieces += 1
                continue
            # Only within a second, so that a purge of times in between can separate them.
            is_next = run is not None and run.offset + len(run.tokens) == waiting.offset
            if run is not None and is_next and waiting.at_ms - run.at_ms < 1000:
                run.tokens += tokens
            else:
                newest[key] = run = _Run(*key, waiting.offset, tokens, waiting.at_ms)
                runs.append(run)
        return [
            (
                run.namespace,
                Piece(run.document_id, run.offset, np.array(run.tokens, np.int32), kind=run.kind, time_s=run.at_ms),
            )
            for run in runs
        ]

    def _write(self, taken: list[tuple[str, Piece]]) -> list[tuple[str, Piece]]:
        """Write namespace by namespace. Returns what should be retried."""
        by_namespace: dict[str, list[Piece]] = {}
        for namespace, piece in taken:
            by_namespace.setdefault(namespace, []).append(piece)
        while by_namespace:
            namespace, pieces = next(iter(by_namespace.items()))
            try:
                self._write_namespace(namespace, pieces)
            except StoreRefused as error:
                log.debug("tokens of namespace %s are dropped: %s", namespace, error)
                self.counters.refused_tokens += sum(len(piece.token_ids) for piece in pieces)
            except StoreError as error:
                self.counters.failures += 1
                self._breaker.failed(time.monotonic())
                if self._breaker.num_opened > self.counters.breaker_opened:
                    log.warning("the shared cache cannot be written, tokens are kept or dropped: %s", error)
                self.counters.breaker_opened = self._breaker.num_opened
                by_namespace[namespace] = by_namespace.pop(namespace)  # retried last: only its cluster node may be away
                return [(namespace, piece) for namespace, pieces in by_namespace.items() for piece in pieces]
            except SettingError as error:
                log.warning("tokens of a namespace are dropped: %s", error)
                self.counters.invalid_pieces += len(pieces)
            else:
                if self._breaker.is_open:
                    log.info("the shared cache can be written again")
                self._breaker.succeeded()
            del by_namespace[namespace]
        return []

    def _write_namespace(self, namespace: str, pieces: list[Piece]) -> None:
        if namespace not in self._namespaces:
            if len(self._namespaces) >= _MAX_NAMESPACES:
                self._namespaces.clear()
            self._namespaces[namespace] = self._open(namespace)
        opened = self._namespaces[namespace]
        if time.monotonic() - opened.asked_s > _CLOCK_S:
            opened.ahead_s, opened.asked_s = _ahead_s(opened.store), time.monotonic()
        try:
            self._append(opened, [piece for piece in pieces if piece.time_s >= opened.from_ms])
        except NamespacePurged as purged:
            self._begin_again(opened, purged)
            times = PurgedTimes.decode(opened.purges)
            kept = [
                piece
                for piece in pieces
                if piece.time_s >= opened.from_ms and not times.covers(opened.time_s(piece.time_s))
            ]
            self._append(opened, kept)
            num_dropped = sum(len(piece.token_ids) for piece in pieces) - sum(len(piece.token_ids) for piece in kept)
        else:
            num_dropped = sum(len(piece.token_ids) for piece in pieces if piece.time_s < opened.from_ms)
        self.counters.purged_tokens += num_dropped

    def _open(self, namespace: str) -> _Opened:
        store, codec = self._open_namespace(namespace)
        epoch = store.begin_epoch(self._settings.keep_s)
        return _Opened(store, codec, ahead_s=_ahead_s(store), asked_s=time.monotonic(), epoch=epoch)

    def _begin_again(self, opened: _Opened, purged: NamespacePurged) -> None:
        """Take over the current epoch and purges."""
        noted, known = PurgedTimes.decode(purged.purges).ranges, PurgedTimes.decode(opened.purges).ranges
        if purged.epoch != opened.epoch:
            now_ms = _now_ms()
            opened.epoch = purged.epoch or opened.store.begin_epoch(self._settings.keep_s)
            if set(noted) <= set(known):  # the purge's note was lost, or the data were: the time is unknown
                opened.from_ms = now_ms - _NOTED_MS
        opened.purges = purged.purges

    def _append(self, opened: _Opened, pieces: list[Piece]) -> None:
        timed = [replace(piece, time_s=opened.time_s(piece.time_s)) for piece in pieces]
        joined = assemble(timed)
        batches = split_pieces(joined, self._settings.entry_tokens, MAX_ENTRY_PIECES)
        frames = [encode_entry(opened.codec, batch) for batch in batches]
        if not frames:
            return
        settings = self._settings
        opened.store.append(
            frames, settings.max_log_entries, keep_s=settings.keep_s, purges=opened.purges, epoch=opened.epoch
        )
        self.counters.written_bytes += sum(map(len, frames))
        self.counters.written_tokens += sum(len(piece.token_ids) for piece in joined)


def _ahead_s(store: Store) -> float:
    try:
        return store.server_time_ms() / 1000 - time.monotonic()
    except StoreRefused:  # no permission
        return time.time() - time.monotonic()


def _now_ms() -> int:
    return int(time.monotonic() * 1000)


def _checked_tokens(waiting: _Waiting) -> array[int]:
    """The tokens. Raises ValueError or TypeError for arguments that no entry can hold."""
    namespace, document_id, offset, token_ids, kind, _ = waiting
    tokens = array("i", token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids)
    if not isinstance(namespace, str) or not isinstance(document_id, bytes) or len(document_id) != DOCUMENT_ID_BYTES:
        raise ValueError
    if namespace == PUBLIC:  # only the promotion gate writes it
        raise ValueError
    if min(tokens) < 0 or not 0 <= index(kind) < 256:
        raise ValueError
    if not 0 <= index(offset) <= MAX_DOCUMENT_TOKENS - len(tokens):
        raise ValueError
    return tokens
