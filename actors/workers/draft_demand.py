"""What routers say of draft workers: whether those that there are suffice, and what one more or one fewer would do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftDemand:
    late_share: float = 0.0  # of the drafts waited for, that came too late
    gain: float = 0.0  # of tokens a second by one more worker, relative: 0.1 is a tenth more
    loss: float = 0.0  # of tokens a second with one worker fewer, relative


def combined(demands: Iterable[DraftDemand]) -> DraftDemand:
    """Of several routers: workers serve them all, so whoever would gain or lose most decides."""
    told = list(demands)
    return DraftDemand(
        max((demand.late_share for demand in told), default=0.0),
        max((demand.gain for demand in told), default=0.0),
        max((demand.loss for demand in told), default=0.0),
    )
