"""How a router takes part in what routers learn together."""

from __future__ import annotations

from dataclasses import dataclass

from cache_service.automata.automata_index import AutomataIndex
from cluster.cache.soft_sharing import SoftSharing
from cluster.router.guarded_sink import TokenSink


@dataclass(frozen=True, slots=True)
class SharedLearning:
    """The router's ends of the shared cache; without any of them, what it learns stays with it."""

    token_sink: TokenSink | None = None  # told of committed tokens that may be learnt from
    soft_sharing: SoftSharing | None = None  # exchanges the counts of the drafter "soft_ngram" with other routers
    index: AutomataIndex | None = None  # phrases for the lookahead of draft workers
