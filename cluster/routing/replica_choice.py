"""Routers by rank, as Serve's request router tries them, and its simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from actors.messages import GenerationRequest
from cluster.routing.known_routers import KnownRouters, routed_prompt

Replica = TypeVar("Replica")


def soonest_first(
    known: KnownRouters, ready: Mapping[str, Replica], request: GenerationRequest, now: float
) -> list[list[Replica]]:
    """Replicas by rank, see `KnownRouters.ranks`. Where the first one is alone, it is taken that it gets the request.

    ready: replicas by router id.
    """
    prompt = routed_prompt(request)
    ranks = known.ranks(list(ready), prompt, now)
    if ranks and len(ranks[0]) == 1:
        known.sent(ranks[0][0], prompt)
    return [[ready[router_id] for router_id in rank] for rank in ranks]
