"""Routers by rank, as Serve's request router tries them, and its simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from actors.messages import GenerationRequest
from cluster.routing.known_routers import KnownRouters, RoutedPrompt

Replica = TypeVar("Replica")


def soonest_first(
    known: KnownRouters,
    ready: Mapping[str, Replica],
    request: GenerationRequest,
    prompt: RoutedPrompt,
    now: float,
) -> Iterator[list[Replica]]:
    """Replicas by rank, see `KnownRouters.ranks`. Where the first one is alone, it is taken that it gets the request.
    The router that has refused the request comes last, and is taken not to have its prompt.

    ready: replicas by router id. prompt: the request's.
    """
    refused_by = "" if request.refusal is None else request.refusal.router_id
    if refused_by:
        known.refused(refused_by, prompt)
    asked = {router_id: ready[router_id] for router_id in ready if router_id != refused_by} if refused_by else ready
    ranks = known.ranks(asked.keys(), prompt, now)
    if ranks and len(ranks[0]) == 1:
        known.sent(ranks[0][0], prompt)
    if refused_by in ready:
        ranks.append([refused_by])
    return ([ready[router_id] for router_id in rank] for rank in ranks)
