"""Reads the logs of a Redis Cluster: a `LogPump` for each primary that has some, as if they were one.

All keys of a namespace are at one primary. A log whose primary is lost, or no longer has it, is not followed any more.
Its readers ask the Cluster then, and have it followed where it is.
"""

from __future__ import annotations

import selectors
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeAlias

from cache_service.errors import CacheError, StoreError, StoreUnavailable
from cache_service.log.log_pump import PING_S, Followed, LogPump
from cache_service.log.log_tail import News
from cache_service.store.answers import faults_told
from cache_service.store.circuit_breaker import CircuitBreaker
from cache_service.store.connection import ConnectionSettings, cluster_client
from cache_service.store.store import LogView

_MAX_PAUSE_S = 10.0  # between two tries to reach a primary
_LONGEST_CALL_S = 1.0  # of a primary: they are called one after the other
_OTHER_NODES = 3  # that are asked if the first primary is away when the Cluster is opened
_SLOTS_S = 1.0  # between two reads of the slot map

_Address: TypeAlias = tuple[str, int]


class ClusterPump:
    """As `LogPump`. Losing a primary raises nothing: each of its logs is reported as no longer followed.

    Timeouts of the settings are capped at a second, and their retries are not used.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings = replace(
            settings,
            connect_timeout_s=min(_LONGEST_CALL_S, settings.connect_timeout_s),
            read_timeout_s=min(_LONGEST_CALL_S, settings.read_timeout_s),
            num_retries=_OTHER_NODES,
        )
        self._pumps: dict[_Address, LogPump] = {}
        self._descriptors: dict[_Address, int] = {}  # of the pumps; one that has lost its primary has none
        self._primaries: dict[str, _Address] = {}  # by log
        self._refused: set[str] = set()  # logs that could not be followed
        self._tries = defaultdict[_Address | None, CircuitBreaker](lambda: CircuitBreaker(1, max_pause_s=_MAX_PAUSE_S))
        self._next_sign = time.monotonic() + PING_S
        with faults_told():
            self._cluster = cluster_client(settings)
        self._slots_at = time.monotonic()  # when the slot map was read
        self._may_have_moved = False  # slots, since then
        self._ready = selectors.DefaultSelector()

    def fileno(self) -> int:
        """Readable when a primary has said something."""
        return self._ready.fileno()

    def follow(self, followed: Followed, view: LogView, cursor: str) -> News | None:
        """As `LogPump.follow`. That a log cannot be followed is among the next news."""
        try:
            known = self._pump_of(followed).follow(followed, view, cursor)
        except (CacheError, OSError):
            self._refused.add(followed.name)
            return None
        self._refused.discard(followed.name)
        return known

    def forget(self, name: str) -> None:
        self._refused.discard(name)
        primary = self._primaries.pop(name, None)
        if primary is not None:
            self._pumps[primary].forget(name)

    def wait_s(self) -> float:
        if self._refused:
            return 0.0
        next_sign_s = max(0.0, self._next_sign - time.monotonic())
        return min([next_sign_s, *(pump.wait_s() for pump in self._pumps.values())])

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
                    self._may_have_moved = True
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
        """Raises CacheError or OSError."""
        primary = self._primaries.get(followed.name) or self._primary_for(followed)
        pump = self._pumps.get(primary) or self._open_pump(primary)
        self._primaries[followed.name] = primary
        return pump

    def _primary_for(self, followed: Followed) -> _Address:
        if self._may_have_moved and time.monotonic() > self._slots_at + _SLOTS_S:
            self._read_slots()
        with faults_told():
            node = self._cluster.get_node_from_key(followed.keys.epoch)  # type: ignore[no-untyped-call]
        return str(node.host), int(node.port)

    def _read_slots(self) -> None:
        """The map before stays if no node tells a new one: most of it is right."""
        with suppress(CacheError, OSError), self._trying(None), faults_told():
            self._cluster.nodes_manager.initialize()
            self._slots_at, self._may_have_moved = time.monotonic(), False

    def _open_pump(self, primary: _Address) -> LogPump:
        with self._trying(primary):
            pump = LogPump(self._settings.at_node(*primary))
            try:
                self._ready.register(pump.fileno(), selectors.EVENT_READ)
            except BaseException:
                pump.close()
                raise
        self._pumps[primary], self._descriptors[primary] = pump, pump.fileno()
        return pump

    def _lose(self, primary: _Address) -> list[News]:
        self._close(primary)
        return [News(name) for name, place in self._primaries.items() if place == primary]

    def _close(self, primary: _Address) -> None:
        self._ready.unregister(self._descriptors.pop(primary))
        self._pumps.pop(primary).close()

    @contextmanager
    def _trying(self, primary: _Address | None) -> Iterator[None]:
        """Raises StoreUnavailable if it is too early to try again. None: the slot map."""
        tries = self._tries[primary]
        if tries.wait_s(time.monotonic()):
            raise StoreUnavailable(f"Redis Cluster: {primary or 'its primaries'} could not be reached a moment ago")
        try:
            yield
        except (CacheError, OSError):
            tries.failed(time.monotonic())
            self._may_have_moved = True
            raise
        tries.succeeded()
