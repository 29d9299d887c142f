"""Tells a process when what it has learnt of a namespace must be forgotten, wherever it keeps that.

A purge ends the namespace's epoch. Indexes and soft counts see that by themselves; what drafters learn of the rounds
of one process comes from nowhere in the cache, so nothing there tells of its end. This looks at the epochs of the
namespaces that are learnt of, all in one question. It knows no times: whatever part was purged, all of it goes.

What is learnt must not outlive the watch over it. So a namespace that gives way to others counts as ended, and so does
one that could not be looked at soon after it was first learnt of, or has a purge noted then: that may have been after
the beginning. The least recently used of the owner with most namespaces gives way. One that gives way in an index,
which is smaller, is still watched and loses nothing. Nor does the watch keep what has expired: nobody uses it any more,
so it has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated
from weakref import WeakKeyDictionary

from pydantic import Field

from cache_service.errors import SettingError, StoreError, StoreRefused
from cache_service.formats.store_keys import StoreKeys
from cache_service.options import KeepSeconds, Options, PollSeconds
from cache_service.store.answers import as_optional_text, faults_told
from cache_service.store.connection import Connection
from cache_service.store.fair_share import first_to_give_way
from cache_service.store.store import KEEP_S, Store
from cache_service.store.turns import Turns

log = logging.getLogger(__name__)

MAX_NAMESPACES = 4096  # the most that settings may allow

_IDLE_S = 60.0
_UNUSED_S = 60.0  # after its last use, that the end of a namespace's data set is the end of its watch


class EpochWatchSettings(Options):
    """How often to look, and at how much."""

    look_s: PollSeconds = 0.3  # between looks
    retry_s: PollSeconds = 1.0  # after a look that found no server
    # Limit of the time from the start of a watch to its first look; a later one may have missed a purge.
    first_look_s: PollSeconds = 1.0
    max_namespaces: Annotated[int, Field(ge=1, le=MAX_NAMESPACES)] = 256  # beyond it, one gives way
    keep_s: KeepSeconds = KEEP_S  # life of an epoch that the watch has begun


@dataclass(slots=True, eq=False)
class _Watched:
    keys: StoreKeys
    since: float
    used: float
    epoch: str | None = None  # None: not known yet


class _Anybody:
    """Who is told where there is only one."""


_ANYBODY = _Anybody()


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
        self._ended: WeakKeyDictionary[object, dict[str, None]] = WeakKeyDictionary()  # by who is still to be told
        self._is_away = False
        self._turns = Turns("cache-epochs")

    def watch(self, namespace: str, learner: object = _ANYBODY) -> None:
        """Something is learnt of it from now on, by this learner of the process. Cheap; call it for every request, and
        again for those that run when `ended` tells their namespace. A name that no namespace can have is not watched:
        it cannot be purged either."""
        with self._lock:
            self._ended.setdefault(learner, {})
            known, now = self._watched.get(namespace), time.monotonic()
            if known is not None:
                known.used = now
                self._watched.move_to_end(namespace)
                return
            try:
                self._watched[namespace] = _Watched(self._keys_of(namespace), now, now)
            except SettingError:
                return
            if len(self._watched) > self._settings.max_namespaces:
                gone = first_to_give_way(list(self._watched))
                del self._watched[gone]
                self._end(gone)
        self._turns.add("look", self._look)  # at once

    def ended(self, learner: object = _ANYBODY) -> Sequence[str]:
        """Namespaces of which this learner must forget everything it has learnt; each learner is told once."""
        if not self._ended.get(learner):
            return ()
        with self._lock:
            ended, self._ended[learner] = self._ended[learner], {}
        return tuple(ended)

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the thread; False if it still waits for Redis after `timeout_s`."""
        return self._turns.close(timeout_s)

    def _end(self, namespace: str) -> None:
        """Call it with the lock held."""
        for ended in self._ended.values():
            ended[namespace] = None

    def _look(self) -> float:
        with self._lock:
            watched = list(self._watched.items())
        if not watched:
            return _IDLE_S
        try:
            epochs, noted = self._read(watched)
        except StoreError as error:
            if not self._is_away:
                log.warning("purges are not heard of for now: %s", error)
            self._is_away = True
            return self._settings.retry_s
        self._is_away = False
        now = time.monotonic()
        with self._lock:
            for (namespace, one), epoch in zip(watched, epochs, strict=True):
                if self._watched.get(namespace) is not one:
                    continue
                if epoch is None:
                    if one.epoch is not None and now - one.used > _UNUSED_S:
                        del self._watched[namespace]
                        self._end(namespace)
                    continue
                is_late = one.epoch is None and now - one.since > self._settings.first_look_s
                if is_late or namespace in noted or one.epoch not in (None, epoch):
                    self._end(namespace)
                one.epoch = epoch
        return self._settings.look_s

    def _read(self, watched: Sequence[tuple[str, _Watched]]) -> tuple[list[str | None], set[str]]:
        """Epochs; where there is none and the namespace is in use, one begins, whose end will be seen. None: it is not,
        or this server does not let us. And of the namespaces that are looked at for the first time, those of which a
        purge is noted."""
        new = [(namespace, one.keys) for namespace, one in watched if one.epoch is None]
        with faults_told(), self._connection.client().pipeline(transaction=False) as pipeline:
            for _, one in watched:
                pipeline.get(one.keys.epoch)
            for _, keys in new:
                pipeline.get(keys.purges)
            answers = pipeline.execute()
            epochs = [as_optional_text(epoch) for epoch in answers[: len(watched)]]
            notes = answers[len(watched) :]
            noted = {namespace for (namespace, _), note in zip(new, notes, strict=True) if note}
        now = time.monotonic()
        for index, (epoch, (_, one)) in enumerate(zip(epochs, watched, strict=True)):
            if epoch is None and (one.epoch is None or now - one.used <= _UNUSED_S):
                keys = one.keys
                try:
                    epochs[index] = Store(self._connection, keys).begin_epoch(self._settings.keep_s)
                except StoreRefused as error:
                    log.debug("no epoch of namespace %s can be begun: %s", keys.namespace, error)
        return epochs, noted
