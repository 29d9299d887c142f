"""What routers tell the directory about draft workers and target groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftDemand:
    """Whether the draft workers suffice, and what one more or one fewer would do to tokens per second."""

    late_share: float = 0.0  # drafts that came too late / drafts waited for
    gain: float = 0.0  # relative, by one more worker: 0.1 is a tenth more
    loss: float = 0.0  # relative, with one worker fewer


@dataclass(frozen=True, slots=True)
class TargetDemand:
    """How long requests wait for a target group, and how much of its room is in use."""

    queue_s: float = 0.0  # age of the oldest request that waits for its first round
    used_share: float = 0.0  # of the sequences that may run at once or of the KV blocks, the larger share: 0 to 1


def combined_drafts(demands: Iterable[DraftDemand]) -> DraftDemand:
    """Workers serve all routers, so the one that would gain or lose most decides."""
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
