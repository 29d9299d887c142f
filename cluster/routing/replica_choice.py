"""Routers by rank, as Serve's request router tries them, and its simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from actors.messages import GenerationRequest
from cluster.routing.known_routers import KnownRouters, routed_prompt

Replica = TypeVar("Replica")


def ready_first(
    candidates: Sequence[Replica],
    is_ready: Callable[[Replica], bool],
    sample: Callable[[Sequence[Replica], int], list[Replica]],
) -> list[list[Replica]]:
    """Replicas by rank: those that are ready, then the others. The shortest queue of the first rank that has room is
    taken, among equally short queues the first. sample: as `random.sample`."""
    mixed = sample(candidates, len(candidates))
    ready = [replica for replica in mixed if is_ready(replica)]
    if len(ready) == len(mixed):
        return [ready, []]
    return [ready, [replica for replica in mixed if not is_ready(replica)]]


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
