"""Reads logs from the server when it says that they have changed.

The server remembers which keys this connection has read and names each once when it changes (client-side caching of
Redis 6 and later). So a log without news costs nothing, and a busy one is read as often as its changes are awaited.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from cache_service.errors import StoreRefused, StoreUnavailable
from cache_service.formats.store_keys import StoreKeys
from cache_service.log.folded_log_reader import Place, reset_reason
from cache_service.log.log_tail import News
from cache_service.store.answers import as_optional_text, faults_told
from cache_service.store.connection import ConnectionSettings, open_notified_client
from cache_service.store.store import LogView, log_view

PING_S = 2.0
"""Pause between two signs of life."""

# A proxy may keep the server's messages to itself, so all logs are also read without them. A purge must be heard of
# sooner: epochs alone are read more often.
EPOCHS_S = 4.0
"""Pause between two reads of all epochs, at a sign of life."""

SURE_S = 60.0
"""Pause between two reads of a log that does not change, at a sign of life."""

_SETTLE_S = 0.005  # from a change to the read; a writer extends the life of what it has written
_LOGS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Followed:
    """A log, or only the epoch of a namespace."""

    keys: StoreKeys
    at_once: int  # most entries per read; 0: only the epoch
    every_s: float  # between reads while it goes on changing; the first change is read at once

    @property
    def name(self) -> str:
        return self.keys.log if self.at_once else self.keys.epoch

    @property
    def all_keys(self) -> Sequence[str]:
        return (self.keys.epoch, self.keys.manifest, self.keys.log) if self.at_once else (self.keys.epoch,)


@dataclass(slots=True, eq=False)
class _Log:
    followed: Followed
    place: Place[Any, Any]
    is_known: bool = False  # whether its state has been told of
    not_before: float = 0.0  # time of the next read
    read_at: float = 0.0


class LogPump:
    """Follows any number of logs over one connection. Not thread-safe. Methods raise StoreError, and only `close` may
    be called then."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._logs: dict[str, _Log] = {}
        self._names_of: dict[str, set[str]] = {}  # by key
        self._due: dict[str, None] = {}
        self._next_ping = time.monotonic() + PING_S
        self._next_epochs = time.monotonic() + EPOCHS_S
        self._client = open_notified_client(settings)
        try:
            with faults_told():
                self._connection = self._connect()
                self._connection._parser.set_invalidation_push_handler(self._changed)
                self._connection.send_command("CLIENT", "TRACKING", "ON")
                self._connection.read_response()
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Readable when the server has said something."""
        return int(self._connection._sock.fileno())

    def follow(self, followed: Followed, view: LogView, cursor: str) -> News | None:
        """Follow a log from an entry on. view: what is known there. Returns its state if it is followed already."""
        known = self._logs.get(followed.name)
        if known is not None:
            return self._state(known, []) if known.is_known else None
        self._logs[followed.name] = _Log(followed, Place(view.epoch, view.version, cursor))
        for key in followed.all_keys:
            self._names_of.setdefault(key, set()).add(followed.name)
        self._due[followed.name] = None
        return None

    def forget(self, name: str) -> None:
        gone = self._logs.pop(name, None)
        self._due.pop(name, None)
        for key in gone.followed.all_keys if gone is not None else ():
            names = self._names_of[key]
            names.discard(name)
            if not names:
                del self._names_of[key]

    def wait_s(self) -> float:
        """Seconds until `news` is to be called again, if the server says nothing."""
        next_read = min((self._logs[name].not_before for name in self._due), default=math.inf)
        return max(0.0, min(next_read, self._next_ping) - time.monotonic())

    def news(self) -> list[News]:
        """Take in what the server has said, and read logs that are due."""
        with faults_told():
            self._take_messages()
            now, found = time.monotonic(), []
            if now >= self._next_ping:
                self._ping(now)
                found.append(News(""))
            due = [log for name in self._due if (log := self._logs[name]).not_before <= now]
            found += self._read(due[:_LOGS_AT_ONCE])
            self._take_messages()  # those received with the answers: `fileno` does not show them
            return found

    def close(self) -> None:
        self._client.connection_pool.disconnect()

    def _connect(self) -> Any:
        return self._client.connection_pool.get_connection()

    def _changed(self, message: Any) -> None:
        settled = time.monotonic() + _SETTLE_S
        for key in self._names_of if message[1] is None else message[1]:  # None: all keys
            for name in self._names_of.get(key if isinstance(key, str) else key.decode(), ()):
                if name not in self._due:
                    self._due[name] = None
                    self._logs[name].not_before = max(self._logs[name].not_before, settled)

    def _take_messages(self) -> None:
        while self._connection.can_read(timeout=0):
            self._connection.read_response(push_request=True)

    def _ping(self, now: float) -> None:
        """Give a sign of life. Logs that are read without a message become due."""
        self._next_ping = now + PING_S
        keys: list[str] = []
        if now >= self._next_epochs:
            self._next_epochs = now + EPOCHS_S
            keys = list({log.followed.keys.epoch: None for log in self._logs.values()})
        _, *epochs = self._ask([("PING",), *(("GET", key) for key in keys)])
        found = dict(zip(keys, epochs, strict=True))
        for name, log in self._logs.items():
            known = None if log.place.epoch is None else log.place.epoch.encode()
            if found.get(log.followed.keys.epoch, known) != known:
                self._due[name], log.not_before = None, now
            elif log.read_at < now - SURE_S:
                self._due[name] = None

    def _read(self, logs: Sequence[_Log]) -> list[News]:
        if not logs:
            return []
        commands: list[tuple[Any, ...]] = []
        for log in logs:
            del self._due[log.followed.name]  # before reading, so that later changes make it due again
            keys, at_once = log.followed.keys, log.followed.at_once
            if not at_once:
                commands.append(("GET", keys.epoch))
                continue
            commands += [("MULTI",), ("GET", keys.epoch), ("HGET", keys.manifest, "version")]
            commands += [("XRANGE", keys.log, log.place.cursor, "+", "COUNT", at_once + 1), ("EXEC",)]
        answers = self._ask(commands)
        now = time.monotonic()
        found: list[News] = []
        for log in logs:
            log.read_at = now
            every_s = log.followed.every_s
            log.not_before = (now // every_s + 1) * every_s  # the same time for all
            news = self._take(log, [answers.pop(0) for _ in range(5 if log.followed.at_once else 1)][-1])
            if news is not None:
                found.append(news)
        return found

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers, with an error in place of a refused command's."""
        self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
        return [self._answer() for _ in commands]

    def _answer(self) -> Any:
        try:
            return self._connection.read_response()
        except ResponseError as error:
            return error

    def _take(self, log: _Log, answer: Any) -> News | None:
        place, at_once = log.place, log.followed.at_once
        try:
            with faults_told():
                if isinstance(answer, Exception):
                    raise answer
                if not at_once:
                    view = LogView(as_optional_text(answer), 0, [])
                else:
                    if any(isinstance(one, Exception) for one in answer):
                        raise ResponseError
                    view = log_view(place.cursor, *answer)
        except (StoreRefused, StoreUnavailable):
            self.forget(log.followed.name)
            return News(log.followed.name)  # its readers will find out themselves
        if at_once and reset_reason(place, view) is not None:
            self.forget(log.followed.name)
            return News(log.followed.name)
        entries = view.after(place.cursor)
        is_new = not log.is_known or bool(entries) or (place.epoch, place.version) != (view.epoch, view.version)
        log.is_known = True
        place.epoch, place.version = view.epoch, view.version
        place.is_anchored = place.is_anchored or len(entries) < len(view.entries)
        news = self._state(log, entries)
        if entries:
            place.cursor, place.is_anchored = entries[-1][0], True
            if len(entries) >= at_once:
                self._due[log.followed.name], log.not_before = None, 0.0
        return news if is_new else None

    def _state(self, log: _Log, entries: list[tuple[str, bytes]]) -> News:
        place = log.place
        return News(log.followed.name, place.epoch, place.version, place.cursor, place.is_anchored, entries)
