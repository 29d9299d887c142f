"""Tells the learners of a process when they must forget a namespace, because it was purged.

A purge ends the namespace's epoch. Indexes and soft counts notice that while they read the cache, but drafters also
learn from the process's own rounds. So this follows the epochs of all namespaces they learn from, or polls them in one
request where no feed tells of them. It does not know which times were purged: everything learnt of the namespace is
forgotten.

Nothing learnt may outlive the watch over it, so a namespace also counts as ended when it is evicted from the watch,
when its first look comes too late or finds a noted purge (the purge may have come after learning began), and when it
has expired unused. The owner with most namespaces loses its least recently used one. Namespaces that an index evicts,
which holds fewer, stay watched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated
from weakref import WeakKeyDictionary

from pydantic import Field

from cache_service.errors import SettingError, StoreError, StoreRefused
from cache_service.formats.store_keys import StoreKeys
from cache_service.log.log_feed import REST_S, LogFeed, Subscription
from cache_service.options import KeepSeconds, Options, PollSeconds
from cache_service.store.answers import as_optional_text, faults_told
from cache_service.store.connection import Connection
from cache_service.store.fair_share import first_to_give_way
from cache_service.store.store import KEEP_S, Store
from cache_service.store.turns import Turns

log = logging.getLogger(__name__)

MAX_NAMESPACES = 4096  # the most that settings may allow

_IDLE_S = 60.0
_UNUSED_S = 60.0  # a namespace that expires this long after its last use is no longer watched


class EpochWatchSettings(Options):
    """Polling intervals and limits."""

    look_s: PollSeconds = 0.3  # between looks
    retry_s: PollSeconds = 1.0  # after a look without a server
    first_look_s: PollSeconds = 1.0  # a later first look may have missed a purge
    max_namespaces: Annotated[int, Field(ge=1, le=MAX_NAMESPACES)] = 256  # beyond it, one is evicted
    keep_s: KeepSeconds = KEEP_S  # time to live of an epoch begun by the watch


@dataclass(slots=True, eq=False)
class _Watched:
    keys: StoreKeys
    since: float
    used: float
    subscription: Subscription | None
    epoch: str | None = None  # None: not known yet

    def told(self) -> str | None:
        """The epoch as the feed has told it; None: it has to be asked for."""
        return None if self.subscription is None or self.epoch is None else self.subscription.read_epoch()

    def close(self) -> None:
        if self.subscription is not None:
            self.subscription.close()


class _OnlyLearner:
    """Stands for the learner of a process that has one."""


class EpochWatch:
    """Watches the epochs of namespaces in a background thread. Thread-safe; faults of the store are not raised."""

    def __init__(
        self,
        connection: Connection,
        keys_of: Callable[[str], StoreKeys],
        settings: EpochWatchSettings | None = None,
        feed: LogFeed | None = None,
    ) -> None:
        """keys_of: returns a namespace's keys; raises SettingError for an invalid name. feed: tells of epochs that
        have changed; None: they are polled."""
        self._feed = feed
        self._connection = connection
        self._keys_of = keys_of
        self._settings = settings or EpochWatchSettings()
        self._lock = threading.Lock()
        self._watched: OrderedDict[str, _Watched] = OrderedDict()  # least recently used first
        self._ended: WeakKeyDictionary[object, dict[str, None]] = WeakKeyDictionary()  # by learner, not told yet
        self._is_away = False
        self._turns = Turns("cache-epochs")

    def watch(self, namespace: str, learner: object = _OnlyLearner) -> None:
        """`learner` learns from the namespace from now on. Cheap: call it for every request, and again for running
        requests after `ended` has returned their namespace. Invalid names are ignored, since none can be purged."""
        with self._lock:
            self._ended.setdefault(learner, {})
            known, now = self._watched.get(namespace), time.monotonic()
            if known is not None:
                known.used = now
                self._watched.move_to_end(namespace)
                return
            try:
                self._watched[namespace] = _Watched(keys := self._keys_of(namespace), now, now, self._follow(keys))
            except SettingError:
                return
            if len(self._watched) > self._settings.max_namespaces:
                gone = first_to_give_way(list(self._watched))
                self._watched.pop(gone).close()
                self._end(gone)
        self._turns.add("look", self._look)  # at once

    def ended(self, learner: object = _OnlyLearner) -> Sequence[str]:
        """Namespaces of which this learner must forget everything it has learnt; each learner is told once."""
        if not self._ended.get(learner):
            return ()
        with self._lock:
            ended, self._ended[learner] = self._ended[learner], {}
        return tuple(ended)

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the thread; False if it still waits for Redis after `timeout_s`."""
        return self._turns.close(timeout_s)

    def _follow(self, keys: StoreKeys) -> Subscription | None:
        if self._feed is None:
            return None
        store, wake = Store(self._connection, keys), partial(self._turns.hasten, "look")
        return self._feed.follow(store, 0, self._settings.look_s, wake)

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
            told = [one.told() for _, one in watched]
            asked = [one for one, epoch in zip(watched, told, strict=True) if epoch is None]
            answers, noted = self._read(asked) if asked else ([], set())
        except StoreError as error:
            if not self._is_away:
                log.warning("purges are not heard of for now: %s", error)
            self._is_away = True
            return self._settings.retry_s
        self._is_away = False
        now, answered = time.monotonic(), iter(answers)
        epochs = [next(answered) if epoch is None else epoch for epoch in told]
        with self._lock:
            for (namespace, one), epoch in zip(watched, epochs, strict=True):
                if self._watched.get(namespace) is not one:
                    continue
                if epoch is None:
                    if one.epoch is not None and now - one.used > _UNUSED_S:
                        self._watched.pop(namespace).close()
                        self._end(namespace)
                    continue
                is_late = one.epoch is None and now - one.since > self._settings.first_look_s
                if is_late or namespace in noted or one.epoch not in (None, epoch):
                    self._end(namespace)
                one.epoch = epoch
                if one.subscription is not None:
                    one.subscription.follow_epoch(epoch)
        return self._settings.look_s if asked else REST_S

    def _read(self, watched: Sequence[tuple[str, _Watched]]) -> tuple[list[str | None], set[str]]:
        """Epochs in the order of `watched`, and which of the namespaces seen for the first time have a noted purge.

        A used namespace without an epoch gets one, so that its end can be seen. None: it is unused, or Redis refused.
        """
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
