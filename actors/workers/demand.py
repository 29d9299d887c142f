"""Demand for draft workers and target groups: what routers report to the directory, and what was set by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftDemand:
    """Late drafts, and the effect of one draft worker more or fewer on tokens a second."""

    late_share: float = 0.0  # drafts that came too late / drafts waited for
    gain: float = 0.0  # relative gain by one more worker; 0.1: a tenth
    loss: float = 0.0  # relative loss with one worker fewer
    held: int = 0  # number of workers that was set by hand; 0: none was


@dataclass(frozen=True, slots=True)
class TargetDemand:
    """Waiting time for a target group, and use of its room."""

    queue_s: float = 0.0  # age of the oldest request that waits for its first round
    used_share: float = 0.0  # 0 to 1: share of running sequences or KV blocks in use, whichever is larger
    held: int = 0  # number of groups that was set by hand; 0: none was


def combined_drafts(demands: Iterable[DraftDemand]) -> DraftDemand:
    """The maximum, because workers serve all routers."""
    told = list(demands)
    return DraftDemand(
        late_share=max((demand.late_share for demand in told), default=0.0),
        gain=max((demand.gain for demand in told), default=0.0),
        loss=max((demand.loss for demand in told), default=0.0),
    )


def combined_targets(demands: Iterable[TargetDemand]) -> TargetDemand:
    """The mean, because each router has its own group and new requests go to the router with the fewest."""
    told = list(demands)
    if not told:
        return TargetDemand()
    return TargetDemand(
        queue_s=sum(demand.queue_s for demand in told) / len(told),
        used_share=sum(demand.used_share for demand in told) / len(told),
    )
