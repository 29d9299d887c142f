"""Reads the logs of a Redis Cluster: a `LogPump` for each primary that has some, as if they were one.

All keys of a namespace are at one primary. A log whose primary is lost, or no longer has it, is not followed any more:
its readers ask the Cluster, and have it followed where it is then.
"""

from __future__ import annotations

import selectors
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from cache_service.errors import StoreError, StoreUnavailable
from cache_service.log.log_pump import PING_S, Followed, LogPump
from cache_service.log.log_tail import News
from cache_service.store.answers import faults_told
from cache_service.store.circuit_breaker import CircuitBreaker
from cache_service.store.connection import ConnectionSettings, cluster_client
from cache_service.store.store import LogView

_MAX_PAUSE_S = 10.0  # between two tries to reach a primary
_PLACES_S = 5.0  # for which it is known where slots are

_Address: TypeAlias = tuple[str, int]


class ClusterPump:
    """As `LogPump`. The loss of a primary is no fault; news of its logs tell it."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._pumps: dict[_Address, LogPump] = {}
        self._primaries: dict[str, _Address] = {}  # by log
        self._refused: list[str] = []  # logs that could not be followed
        self._tries = defaultdict[_Address | None, CircuitBreaker](lambda: CircuitBreaker(1, max_pause_s=_MAX_PAUSE_S))
        self._next_sign = time.monotonic() + PING_S
        self._ready = selectors.DefaultSelector()
        with faults_told():
            self._cluster = cluster_client(settings)
        self._asked_at = time.monotonic()  # where slots are

    def fileno(self) -> int:
        """Readable when a primary has said something."""
        return self._ready.fileno()

    def follow(self, followed: Followed, view: LogView, cursor: str) -> News | None:
        """As `LogPump.follow`. That a log cannot be followed is among the next news."""
        try:
            return self._pump_of(followed).follow(followed, view, cursor)
        except StoreError:
            self._refused.append(followed.name)
            return None

    def forget(self, name: str) -> None:
        primary = self._primaries.pop(name, None)
        if primary is not None:
            self._pumps[primary].forget(name)

    def wait_s(self) -> float:
        if self._refused:
            return 0.0
        next_sign_s = max(0.0, self._next_sign - time.monotonic())
        return min((pump.wait_s() for pump in self._pumps.values()), default=next_sign_s)

    def news(self) -> list[News]:
        found = [News(name) for name in self._refused]
        self._refused.clear()
        for primary, pump in list(self._pumps.items()):
            try:
                told = [one for one in pump.news() if one.name]
            except StoreError:
                told = self._lose(primary)
            for one in told:
                if one.after is None:
                    self._primaries.pop(one.name, None)
            found += told
        if time.monotonic() >= self._next_sign:
            self._next_sign = time.monotonic() + PING_S
            found.append(News(""))
        return found

    def close(self) -> None:
        for primary in list(self._pumps):
            self._close(primary)
        self._cluster.close()
        self._ready.close()

    def _pump_of(self, followed: Followed) -> LogPump:
        """Raises StoreError."""
        primary = self._primaries.get(followed.name) or self._primary_for(followed)
        pump = self._pumps.get(primary) or self._open_pump(primary)
        self._primaries[followed.name] = primary
        return pump

    def _primary_for(self, followed: Followed) -> _Address:
        now = time.monotonic()
        if now - self._asked_at > _PLACES_S:
            with self._trying(None), faults_told():
                former, self._cluster = self._cluster, cluster_client(self._settings)
                former.close()
            self._asked_at = now
        with faults_told():
            node = self._cluster.get_node_from_key(followed.keys.epoch)  # type: ignore[no-untyped-call]
        return str(node.host), int(node.port)

    def _open_pump(self, primary: _Address) -> LogPump:
        with self._trying(primary):
            pump = LogPump(self._settings.at_node(*primary))
        self._pumps[primary] = pump
        self._ready.register(pump.fileno(), selectors.EVENT_READ)
        return pump

    def _lose(self, primary: _Address) -> list[News]:
        self._close(primary)
        return [News(name) for name, place in self._primaries.items() if place == primary]

    def _close(self, primary: _Address) -> None:
        pump = self._pumps.pop(primary)
        self._ready.unregister(pump.fileno())
        pump.close()

    @contextmanager
    def _trying(self, primary: _Address | None) -> Iterator[None]:
        """Raises StoreUnavailable if it is too early to try again. None: to find the primaries."""
        tries, now = self._tries[primary], time.monotonic()
        if tries.wait_s(now):
            raise StoreUnavailable(f"Redis Cluster: {primary or 'its primaries'} could not be reached a moment ago")
        try:
            yield
        except StoreError:
            tries.failed(now)
            raise
        tries.succeeded()
