"""Exchanges the n-gram counts of a router's `soft_ngram` drafter with other routers."""

from __future__ import annotations

from dataclasses import dataclass

from cache_service.counts.soft_exchange import SoftExchange, SoftExchangeStats, SoftTables


@dataclass(frozen=True, slots=True)
class SoftSharing:
    """One router's tables and their exchange. All methods but `stats` run in the thread of its rounds."""

    exchange: SoftExchange
    tables: SoftTables
    shares_prompts: bool  # counts from prompts may leave this process, too

    def follow(self, namespace: str) -> None:
        """Fetch other routers' counts for this namespace. Never raises."""
        self.exchange.follow(namespace)

    def drop(self, namespace: str) -> None:
        """Drop a namespace's counts in the next tick and read them again. Never raises."""
        self.exchange.begin_again(namespace)

    def tick(self, now: float) -> None:
        """Merge received counts and send own ones, for about a millisecond. Never raises."""
        self.exchange.tick(self.tables, now)

    def stats(self) -> SoftExchangeStats:
        return self.exchange.stats
