"""Adds hit statistics to Redis periodically, in a background thread. No method raises, and only `flush` waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from cache_service.errors import CacheError, StoreUnavailable
from cache_service.formats.earnings import Earnings
from cache_service.store.admin_store import AdminStore
from cache_service.store.store import KEEP_S
from cache_service.store.turns import Turns

log = logging.getLogger(__name__)

FLUSH_S = 5.0
_MAX_NAMESPACES = 4096  # with counts waiting for Redis


class EarningsLedger:
    """Sums by namespace. Failed writes are retried; counts are dropped when too many namespaces wait."""

    def __init__(
        self, open_namespace: Callable[[str], AdminStore], flush_s: float = FLUSH_S, keep_s: int = KEEP_S
    ) -> None:
        """keep_s: time to live of the counts after their last update."""
        self.dropped = 0  # requests
        self._keep_s = keep_s
        self._open_namespace = open_namespace
        self._flush_s = flush_s
        self._waiting: dict[str, Earnings] = {}
        self._lock = threading.Lock()
        self._turns = Turns("cache-earnings")
        self._turns.add("flush", self._turn)

    def add(self, namespace: str, earnings: Earnings) -> None:
        with self._lock:
            known = self._waiting.get(namespace)
            if known is None and len(self._waiting) >= _MAX_NAMESPACES:
                self.dropped += earnings.requests
            else:
                self._waiting[namespace] = earnings if known is None else known + earnings

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the thread; False if it still waits for Redis after `timeout_s`. Counts of the last seconds are lost."""
        return self._turns.close(timeout_s)

    def flush(self) -> None:
        """Write all waiting counts; the thread does so every `flush_s`."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        while waiting:
            namespace = next(iter(waiting))
            earnings = waiting.pop(namespace)
            try:
                self._open_namespace(namespace).add_earnings(earnings, self._keep_s)
            except StoreUnavailable as error:
                log.debug("earnings of namespace %s wait: %s", namespace, error)
                # The next write would likely fail as well. This one is retried last: perhaps only its cluster node is
                # unavailable.
                for later, kept in (*waiting.items(), (namespace, earnings)):
                    self.add(later, kept)
                return
            except CacheError as error:
                log.debug("earnings of namespace %s are dropped: %s", namespace, error)
                self.dropped += earnings.requests

    def _turn(self) -> float:
        self.flush()
        return self._flush_s
