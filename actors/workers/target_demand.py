"""What routers say of target groups: how long requests wait for one, and how much of their room is in use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetDemand:
    queue_s: float = 0.0  # how long the oldest request that waits for its first round has waited
    used_share: float = 0.0  # of the sequences that may run at once, or of the KV blocks, whichever is more: 0 to 1


def combined(demands: Iterable[TargetDemand]) -> TargetDemand:
    """Of several routers, each with a group: their mean. Requests go to the router with the fewest, so that one that
    is much worse off than the others will not be for long."""
    told = list(demands)
    if not told:
        return TargetDemand()
    return TargetDemand(
        sum(demand.queue_s for demand in told) / len(told),
        sum(demand.used_share for demand in told) / len(told),
    )
