"""How many target groups there should be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TargetSignals:
    queue_s: float  # as in `TargetDemand`
    used_share: float


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """queue_s: how long requests may wait for their first round; used_share: of the groups' room, that they should
    have in use before there are more, and that those left must stay below for one to go."""

    queue_s: float
    used_share: float


def desired_groups(signals: TargetSignals, limits: TargetLimits, groups: int, fewest: int, most: int) -> int:
    """Where requests wait too long and too much of the groups' room is in use, as many as it takes for that share to be
    right, at most twice as many at once; one fewer where the others have room for all that runs and nobody waits too
    long.

    Never fewer for larger signals. While what runs stays the same, no decision is followed by its opposite, whatever
    becomes of those that wait.
    """
    groups = max(1, groups)
    in_use = groups * signals.used_share
    is_late = signals.queue_s > limits.queue_s
    desired = groups
    if is_late and in_use > groups * limits.used_share:
        desired = max(groups + 1, min(2 * groups, math.ceil(in_use / limits.used_share)))
    elif not is_late and in_use <= limits.used_share * (groups - 1):
        desired = groups - 1
    return max(fewest, min(most, desired))


class TargetPolicy:
    """The same for Ray Serve, which makes one of these from `policy_kwargs` and calls it in its controller.

    The signals are what the groups record, each the same: what routers say of all of them.
    """

    def __init__(self, queue_s: float, used_share: float) -> None:
        self._limits = TargetLimits(queue_s, used_share)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: `ray.serve.config.AutoscalingContext`. Returns replicas, and state, of which there is none."""
        current, target = context.current_num_replicas, context.target_num_replicas
        recorded = context.aggregated_metrics or {}
        if not current or not all(recorded.get(name) for name in ("queue_s", "used_share")):
            return target, {}  # nobody has said anything yet
        queue_s, used_share = (sum(recorded[name].values()) / len(recorded[name]) for name in ("queue_s", "used_share"))
        fewest, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        desired = desired_groups(TargetSignals(queue_s, used_share), self._limits, current, fewest, most)
        # Those that are being started were decided on without what they will do.
        return (max(desired, target) if desired > current else desired), {}
