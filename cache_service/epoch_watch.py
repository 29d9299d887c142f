"""Tells a process when what it has learnt of a namespace must be forgotten, wherever it keeps that.

A purge ends the namespace's epoch. Indexes and soft counts see that by themselves; what drafters learn of the rounds
of one process comes from nowhere in the cache, so nothing there tells of its end. This looks at the epochs of the
namespaces that are learnt of, all in one question. It knows no times: whatever part was purged, all of it goes.

What is learnt must not outlive the watch over it. So a namespace that gives way to others counts as ended, and so does
one that could not be looked at soon after it was first learnt of. One that gives way in an index, which is smaller, is
still watched and loses nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache_service.answers import as_optional_text, faults_told
from cache_service.connection import Connection
from cache_service.errors import SettingError, StoreError, StoreRefused
from cache_service.setting_bounds import require_bounds
from cache_service.store import KEEP_S, Store
from cache_service.store_keys import StoreKeys
from cache_service.turns import Turns

log = logging.getLogger(__name__)

_IDLE_S = 60.0


@dataclass(frozen=True, slots=True)
class EpochWatchSettings:
    """How often to look, and at how much. Raises SettingError."""

    look_s: float = 0.3  # between looks
    retry_s: float = 1.0  # after a look that found no server
    first_look_s: float = 1.0  # after the beginning of a watch; later, something may have been missed
    max_namespaces: int = 256  # the least recently used gives way
    keep_s: int = KEEP_S  # that an epoch lives which the watch has begun

    def __post_init__(self) -> None:
        require_bounds(
            self,
            look_s=(0.001, 60),
            retry_s=(0.001, 60),
            first_look_s=(0.001, 60),
            max_namespaces=(1, 4096),
            keep_s=(1, 2**31),
        )


@dataclass(slots=True, eq=False)
class _Watched:
    keys: StoreKeys
    since: float
    epoch: str | None = None  # None: not known yet


class EpochWatch:
    """Watches the epochs of namespaces in a background thread. Thread-safe; nothing raises for a fault of the store."""

    def __init__(
        self,
        connection: Connection,
        keys_of: Callable[[str], StoreKeys],
        settings: EpochWatchSettings | None = None,
    ) -> None:
        """keys_of: of a namespace; raises SettingError for a name that none can have."""
        self._connection = connection
        self._keys_of = keys_of
        self._settings = settings or EpochWatchSettings()
        self._lock = threading.Lock()
        self._watched: OrderedDict[str, _Watched] = OrderedDict()  # least recently used first
        self._ended: dict[str, None] = {}
        self._is_away = False
        self._turns = Turns("cache-epochs")

    def watch(self, namespace: str) -> None:
        """Something is learnt of it from now on. Cheap; call it for every request. A name that no namespace can have is
        not watched: it cannot be purged either."""
        with self._lock:
            if namespace in self._watched:
                self._watched.move_to_end(namespace)
                return
            try:
                self._watched[namespace] = _Watched(self._keys_of(namespace), time.monotonic())
            except SettingError:
                return
            while len(self._watched) > self._settings.max_namespaces:
                gone, _ = self._watched.popitem(last=False)
                self._ended[gone] = None
        self._turns.add("look", self._look)  # at once

    def ended(self) -> Sequence[str]:
        """Of which namespaces everything that was learnt here is to be forgotten; each is told once."""
        if not self._ended:
            return ()
        with self._lock:
            ended, self._ended = self._ended, {}
        return tuple(ended)

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the thread; False if it still waits for Redis after `timeout_s`."""
        return self._turns.close(timeout_s)

    def _look(self) -> float:
        with self._lock:
            watched = list(self._watched.items())
        if not watched:
            return _IDLE_S
        try:
            epochs = self._read([one.keys for _, one in watched])
        except StoreError as error:
            if not self._is_away:
                log.warning("purges are not heard of for now: %s", error)
            self._is_away = True
            return self._settings.retry_s
        self._is_away = False
        now = time.monotonic()
        with self._lock:
            for (namespace, one), epoch in zip(watched, epochs, strict=True):
                if epoch is None or self._watched.get(namespace) is not one:
                    continue
                is_late = one.epoch is None and now - one.since > self._settings.first_look_s
                if is_late or one.epoch not in (None, epoch):
                    self._ended[namespace] = None
                one.epoch = epoch
        return self._settings.look_s

    def _read(self, keys: Sequence[StoreKeys]) -> list[str | None]:
        """Epochs; where there is none one begins, whose end will be seen. None: this server does not let us."""
        with faults_told(), self._connection.client().pipeline(transaction=False) as pipeline:
            for each in keys:
                pipeline.get(each.epoch)
            epochs = [as_optional_text(epoch) for epoch in pipeline.execute()]
        for index, epoch in enumerate(epochs):
            if epoch is None:
                try:
                    epochs[index] = Store(self._connection, keys[index]).begin_epoch(self._settings.keep_s)
                except StoreRefused as error:
                    log.debug("no epoch of namespace %s can be begun: %s", keys[index].namespace, error)
        return epochs
