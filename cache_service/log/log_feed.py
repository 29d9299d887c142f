"""Keeps what is new in the followed logs in memory, so that readers need not ask the server.

A reader reads the server until it has come to the end of a log. From there on the log is followed by `node_feed`, which
keeps the news of it in a tail and wakes the reader. What a reader does not find there it reads from the server, as it
does while nobody follows. So nothing depends on the feed but how often the server is asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cache_service.formats.stream_id import START
from cache_service.log.folded_log_reader import Place, reset_reason
from cache_service.log.log_pump import Followed
from cache_service.log.log_tail import LogTail, News
from cache_service.log.node_feed import Follow, Forget, NodeFeed
from cache_service.store.connection import ConnectionSettings
from cache_service.store.store import LogView, Store

REST_S = 30.0
"""Pause of a reader that is woken by news."""


class Subscription:
    """One reader's access to a log. Close it after use."""

    def __init__(self, feed: LogFeed, store: Store, followed: Followed, wake: Callable[[], None]) -> None:
        self.followed = followed
        self.wake = wake
        self._feed = feed
        self._store = store
        self._seen: tuple[LogTail, int] | None = None  # what was read last, if that was all

    def read_log(self, place: Place[Any, Any], max_entries: int) -> LogView:
        """As `Store.read_log` from the cursor of the reader's place, from memory if possible."""
        begin = place.cursor
        tail, num_news, view = self._feed.look(self.followed.name, begin, max_entries, place.epoch, place.version)
        if view is not None and tail is not None:
            self._seen = (tail, num_news) if len(view.entries) < max_entries else None
            return view
        self._seen = None
        view = self._store.read_log(begin, max_entries)
        # A place that the reader will give up is not followed: it would not find the one it starts from there.
        if len(view.entries) < max_entries and reset_reason(place, view) is None:
            self._feed.follow_from(self, view, view.entries[-1][0] if view.entries else begin)
        return view

    def read_epoch(self) -> str | None:
        """The epoch of the namespace; None if it is not known here."""
        tail, num_news, _ = self._feed.look(self.followed.name, "", 1, None, 0)
        if tail is None or not num_news:
            return None
        self._seen = tail, num_news
        return tail.epoch

    def follow_epoch(self, epoch: str) -> None:
        """Follow the epoch, which the server has just told."""
        self._feed.follow_from(self, LogView(epoch, 0, []), START)

    @property
    def is_current(self) -> bool:
        """Whether what was read last was all there is. Then `wake` is called with the next news."""
        return self._seen is not None and self._feed.is_newest(self.followed.name, *self._seen)

    @property
    def current_at(self) -> float | None:
        """Monotonic seconds at which that was last known; None: it is not known to be all."""
        return self._feed.heard_at if self.is_current else None

    def close(self) -> None:
        self._feed.unfollow(self)


class LogFeed:
    """The logs that a process follows. Thread-safe; faults are not raised."""

    def __init__(self, settings: ConnectionSettings, directory: Path | None = None) -> None:
        """directory: where the processes of a node meet, created if missing; None: this one shares nothing."""
        self.heard_at = 0.0  # when the server, or who reads it for this node, was last heard
        self._lock = threading.Lock()  # guards the fields below
        self._subscriptions: dict[str, list[Subscription]] = {}
        self._tails: dict[str, LogTail] = {}
        self._is_open = False  # whether logs can be followed now
        self._node = NodeFeed(settings, directory, self)

    def follow(self, store: Store, at_once: int, every_s: float, wake: Callable[[], None]) -> Subscription:
        """Follow a log, read at most `at_once` entries at a time; 0: only the epoch of its namespace.

        every_s: between two reads while it goes on changing. wake: called in another thread when there is something to
        read. It must not block.
        """
        subscription = Subscription(self, store, Followed(store.keys, at_once, every_s), wake)
        with self._lock:
            self._subscriptions.setdefault(subscription.followed.name, []).append(subscription)
        self._node.start()
        return subscription

    def unfollow(self, subscription: Subscription) -> None:
        name = subscription.followed.name
        with self._lock:
            others = self._subscriptions.get(name, [])
            if subscription in others:
                others.remove(subscription)
            if others or self._subscriptions.pop(name, None) is None:
                return
            if self._tails.pop(name, None) is not None:
                self._node.request(Forget(name))  # with the lock held: it may be followed again at once

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the thread; False if it still waits for the server after `timeout_s`."""
        return self._node.close(timeout_s)

    # --- for subscriptions

    def look(
        self, name: str, begin: str, max_entries: int, epoch: str | None, version: int
    ) -> tuple[LogTail | None, int, LogView | None]:
        """The log's tail, if it is followed; how much news it has had; what a reader at `begin` has to read."""
        with self._lock:
            tail = self._tails.get(name)
            if tail is None:
                return None, 0, None
            view = tail.view(begin, max_entries, epoch, version)
            if view is not None and len(self._subscriptions.get(name, ())) == 1:
                tail.forget_until(view.entries[-1][0] if view.entries else begin)
            return tail, tail.num_news, view

    def is_newest(self, name: str, tail: LogTail, num_news: int) -> bool:
        with self._lock:
            return self._tails.get(name) is tail and tail.num_news == num_news

    def follow_from(self, subscription: Subscription, view: LogView, cursor: str) -> None:
        """Follow a log from an entry on, if it is not followed yet."""
        followed, keys = subscription.followed, subscription.followed.keys
        with self._lock:
            if not self._is_open or followed.name in self._tails or followed.name not in self._subscriptions:
                return
            self._tails[followed.name] = LogTail()
            place = (keys.fingerprint, keys.namespace, keys.area)
            pace = (followed.at_once, followed.every_s)
            self._node.request(Follow(*place, *pace, view.epoch, view.version, cursor))

    # --- called by the node's feed

    def opened(self) -> None:
        with self._lock:
            self._is_open, self.heard_at = True, time.monotonic()

    def told(self, news: News) -> None:
        with self._lock:
            self.heard_at = time.monotonic()
            tail = self._tails.get(news.name)
            if tail is None:
                return
            if news.after is None:
                del self._tails[news.name]
                if not tail.num_news:  # it was refused; nobody relies on it yet
                    return
            else:
                tail.take(news)
            subscriptions = list(self._subscriptions.get(news.name, ()))
        for subscription in subscriptions:
            subscription.wake()

    def lost(self) -> bool:
        """Readers ask the server again. False: they did anyway."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
            self._tails.clear()
            subscriptions = [each for several in self._subscriptions.values() for each in several]
        for subscription in subscriptions if was_open else ():
            subscription.wake()
        return was_open
