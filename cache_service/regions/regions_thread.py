"""Exchanges with other clusters periodically, in a background thread. No method raises, and none waits for a store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from cache_service.errors import CacheError
from cache_service.regions.exchange import RegionCounters, RegionExchange, RegionGauges
from cache_service.regions.plan import RegionTerms
from cache_service.store.turns import Turns

log = logging.getLogger(__name__)


class RegionsThread:
    """A failed exchange is counted and logged, and repeated after the usual pause."""

    def __init__(
        self, open_exchange: Callable[[], RegionExchange], terms: Callable[[], RegionTerms | None], interval_s: float
    ) -> None:
        """open_exchange: called in the thread until it does not raise CacheError. terms: those in force; None: they are
        not known yet."""
        self.counters = RegionCounters()
        self.gauges = RegionGauges()
        self._open_exchange = open_exchange
        self._terms = terms
        self._interval_s = interval_s
        self._exchange: RegionExchange | None = None
        self._is_failing = False
        self._turns = Turns("cache-regions")
        self._turns.add("exchange", self._turn)

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the thread and let another process lead; False if it still waits for a store after `timeout_s`."""
        is_done = self._turns.close(timeout_s)
        if is_done and self._exchange is not None:
            with suppress(CacheError):
                self._exchange.close()
        return is_done

    def _turn(self) -> float:
        try:
            self._exchange_once()
        except CacheError as error:
            self.counters.failures += 1
            if not self._is_failing:
                log.warning("not all is exchanged with other clusters for now: %s", error)
            self._is_failing = True
        else:
            if self._is_failing:
                log.info("all that clusters share is exchanged again")
            self._is_failing = False
        return self._interval_s

    def _exchange_once(self) -> None:
        terms = self._terms()
        if terms is None:
            return
        if self._exchange is None:
            self._exchange = self._open_exchange()
        try:
            self._exchange.turn(terms)
        finally:
            self.counters = replace(self._exchange.counters, failures=self.counters.failures)
            self.gauges = self._exchange.gauges
