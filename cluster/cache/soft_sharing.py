"""What a router's `soft_ngram` has learnt goes to the other routers, and what they have learnt comes to it."""

from __future__ import annotations

from dataclasses import dataclass

from cache_service.counts.soft_exchange import SoftExchange, SoftExchangeStats, SoftTables


@dataclass(frozen=True, slots=True)
class SoftSharing:
    """The tables of one router and their exchange. All calls but `stats` in the thread that runs its rounds."""

    exchange: SoftExchange
    tables: SoftTables
    shares_prompts: bool  # what stands in prompts may leave this process, too

    def follow(self, namespace: str) -> None:
        """A request has come that may draft from what others have learnt of this namespace. Never raises."""
        self.exchange.follow(namespace)

    def drop(self, namespace: str) -> None:
        """What is known of a namespace is to be forgotten in the next tick, and read anew. Never raises."""
        self.exchange.begin_again(namespace)

    def tick(self, now: float) -> None:
        """Take in and give out, for about a millisecond. Never raises."""
        self.exchange.tick(self.tables, now)

    def stats(self) -> SoftExchangeStats:
        return self.exchange.stats

    def close(self, timeout_s: float) -> bool:
        """End its threads; False if that takes longer than `timeout_s`."""
        return self.exchange.close(timeout_s)
