"""Follows namespaces of the shared cache in a background thread, with retries during outages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from pydantic import Field

from cache_service.errors import StoreError
from cache_service.log.log_feed import REST_S, LogFeed, Subscription
from cache_service.log.log_reader import Listener, LogReader, ReaderSettings
from cache_service.options import Options, PollSeconds
from cache_service.store.circuit_breaker import CircuitBreaker
from cache_service.store.store import OpenNamespace
from cache_service.store.turns import Turns

log = logging.getLogger(__name__)


class FollowerSettings(Options):
    """Polling intervals."""

    reader: ReaderSettings = Field(default_factory=ReaderSettings)
    poll_s: PollSeconds = 0.1  # after new entries, also with a feed; doubles up to idle_poll_s without any
    idle_poll_s: PollSeconds = 0.5
    unwanted_poll_s: PollSeconds = 1.0  # in place of idle_poll_s for a namespace not used for a while
    retry_s: PollSeconds = 0.2  # after a fault; doubles up to max_retry_s
    max_retry_s: PollSeconds = 2.0


class Follower:
    """Passes the contents of namespaces to listeners. No method raises for a fault of the store."""

    def __init__(
        self, open_namespace: OpenNamespace, settings: FollowerSettings | None = None, feed: LogFeed | None = None
    ) -> None:
        """feed: tells when there is something to read; None: namespaces are polled."""
        self._open_namespace = open_namespace
        self._settings = settings or FollowerSettings()
        self._feed = feed
        self._subscriptions: dict[str, Subscription] = {}
        self._turns = Turns("cache-follower")

    def follow(
        self,
        namespace: str,
        listener: Listener,
        key: str | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> LogReader:
        """Read a namespace for a listener, in place of any earlier one under the same key.

        key: distinguishes several readers of a namespace; None: the namespace. is_wanted: whether the namespace is in
        use, so that it is polled more often. Returns the reader, for its counters and warm_ratio.
        """
        store, codec = self._open_namespace(namespace)
        key = key or namespace
        self.unfollow(key)
        source = None
        if self._feed is not None:
            pace = (self._settings.reader.read_entries, self._settings.poll_s)
            source = self._feed.follow(store, *pace, partial(self._turns.hasten, key))
            self._subscriptions[key] = source
        reader = LogReader(store, codec, listener, self._settings.reader, source)
        self._turns.add(key, _Turn(namespace, reader, self._settings, is_wanted))
        return reader

    def unfollow(self, key: str) -> None:
        """Stop reading. The listener may still be called once."""
        self._turns.remove(key)
        subscription = self._subscriptions.pop(key, None)
        if subscription is not None:
            subscription.close()

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the thread; False if it is still waiting for Redis after `timeout_s`."""
        for key in list(self._subscriptions):
            self.unfollow(key)
        return self._turns.close(timeout_s)


class _Turn:
    """Runs one step of a reader and returns the seconds until the next."""

    def __init__(
        self, namespace: str, reader: LogReader, settings: FollowerSettings, is_wanted: Callable[[], bool]
    ) -> None:
        self._namespace = namespace
        self._reader = reader
        self._settings = settings
        self._is_wanted = is_wanted
        self._breaker = CircuitBreaker(1, settings.retry_s, settings.max_retry_s)
        self._idle_s = settings.poll_s

    def __call__(self) -> float:
        entries = self._reader.counters.entries
        try:
            has_more = self._reader.step()
        except StoreError as error:
            if not self._breaker.is_open:
                log.warning("namespace %s cannot be followed for now: %s", self._namespace, error)
            self._breaker.failed(time.monotonic())
            return self._breaker.wait_s(time.monotonic())
        if self._breaker.is_open:
            log.info("namespace %s is followed again", self._namespace)
        self._breaker.succeeded()
        if has_more:
            return 0.0
        if self._reader.is_current:
            self._idle_s = self._settings.poll_s
            return REST_S
        is_idle = self._reader.counters.entries == entries
        most_s = self._settings.idle_poll_s if self._is_wanted() else self._settings.unwanted_poll_s
        self._idle_s = min(2 * self._idle_s, most_s) if is_idle else self._settings.poll_s
        return self._idle_s
