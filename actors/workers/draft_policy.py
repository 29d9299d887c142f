"""How many draft workers there should be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_ROOM = 0.7  # of the busy share aimed at, that the workers left must stay below for one to go


@dataclass(frozen=True, slots=True)
class DraftSignals:
    busy_share: float  # of the workers' time, in drafting: 0 to 1, their mean
    late_share: float  # of the drafts that routers wait for, that come too late
    gain: float  # as in `DraftDemand`
    loss: float


@dataclass(frozen=True, slots=True)
class DraftTargets:
    """busy_share: what workers should be busy for; late_share: what may be late; min_gain: tokens a second, relative,
    that a worker more must bring."""

    busy_share: float
    late_share: float
    min_gain: float


def desired_workers(signals: DraftSignals, targets: DraftTargets, workers: int, fewest: int, most: int) -> int:
    """More where workers are too busy or too late and one more is worth it by the planner's own estimate, at most twice
    as many at once; one fewer where the others have room for its work and the planner would hardly miss it.

    Never less for larger signals. With min_gain above 0 no decision asks for the opposite of the one before while the
    signals are what the decision should make of them: to go takes half of the gain that it takes to come.
    """
    workers = max(1, workers)
    needed = math.ceil(workers * signals.busy_share / targets.busy_share - 1e-9)
    are_short = needed > workers or signals.late_share > targets.late_share
    have_room = workers * signals.busy_share <= _ROOM * targets.busy_share * (workers - 1)
    desired = workers
    if are_short and signals.gain >= targets.min_gain:
        desired = min(2 * workers, max(workers + 1, needed))
    elif not are_short and have_room and signals.loss <= targets.min_gain / 2:
        desired = workers - 1
    return max(fewest, min(most, desired))


class DraftPolicy:
    """The same for Ray Serve, which makes one of these from `policy_kwargs` and calls it in its controller.

    The signals are what the replicas of the pool record: each its own busy share, and all of them what routers say.
    """

    def __init__(self, busy_share: float, late_share: float, min_gain: float) -> None:
        self._targets = DraftTargets(busy_share, late_share, min_gain)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: `ray.serve.config.AutoscalingContext`. Returns replicas, and state, of which there is none."""
        current, target = context.current_num_replicas, context.target_num_replicas
        recorded = context.aggregated_metrics or {}
        if not current or "busy_share" not in recorded:
            return target, {}  # nobody has said anything yet
        busy = sum(recorded["busy_share"].values())
        told = [max(recorded.get(name, {}).values(), default=0.0) for name in ("late_share", "gain", "loss")]
        signals = DraftSignals(min(1.0, busy / current), *told)
        fewest, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        desired = desired_workers(signals, self._targets, current, fewest, most)
        # Those that are being started were decided on without what they will do.
        return (max(desired, target) if desired > current else desired), {}
