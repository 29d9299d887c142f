"""When Ray Serve starts and stops draft workers and target groups: limits, decisions, and the policies Serve calls.

ray is imported only where Serve's settings are made: the configuration imports this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from cache_service.options import Options

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingConfig as ServeAutoscaling

_ROOM = 0.7  # a draft worker may go if the others stay below this part of the busy share aimed at
_SIGNALS_IN_SIGHT = 5  # signals a replica records in the time that a decision looks back


class AutoscalingConfig(Options):
    """When workers come and go: draft workers between `draft.workers` and `draft.max_workers`, by their own load and
    what routers say of drafting; target groups between `target.groups` and `target.max_groups`, by how long requests
    wait for one."""

    draft_busy_share: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Share of its time that a draft worker should draft."""
    draft_late_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the awaited drafts that may come too late."""
    draft_min_gain: Annotated[float, Field(ge=0, le=0.5)] = 0.03
    """Relative gain in tokens a second that one more draft worker must bring."""
    target_queue_s: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """Seconds that requests may wait for their first round."""
    target_used_share: Annotated[float, Field(gt=0, le=0.95)] = 0.7
    """Share of the groups' room that should be in use."""
    look_back_s: Annotated[float, Field(ge=1, le=3600)] = 30.0
    """Seconds over which signals are averaged."""
    upscale_delay_s: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    """Seconds for which the signals must have asked for more."""
    downscale_delay_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """Seconds for which the signals must have asked for less."""


@dataclass(frozen=True, slots=True)
class DraftSignals:
    busy_share: float  # mean share of the workers' time spent drafting: 0 to 1
    late_share: float  # as in `DraftDemand`
    gain: float
    loss: float


@dataclass(frozen=True, slots=True)
class DraftTargets:
    busy_share: float  # that workers should have
    late_share: float  # at most
    min_gain: float  # tokens a second, relative, that one worker more must bring


@dataclass(frozen=True, slots=True)
class TargetSignals:
    queue_s: float  # as in `TargetDemand`
    used_share: float


@dataclass(frozen=True, slots=True)
class TargetLimits:
    queue_s: float  # that requests may wait for their first round
    used_share: float  # groups are added above it; after one has gone, the others must stay below it


def desired_workers(signals: DraftSignals, targets: DraftTargets, workers: int, fewest: int, most: int) -> int:
    """More draft workers where these are too busy or too late and the planner estimates that one more is worth it, at
    most twice as many at once; one fewer where the others have room for its work and the loss is small.

    Monotonic in the signals. With min_gain above 0 no decision reverses the one before while the signals are what that
    decision should make of them: a worker goes at half of the gain at which it comes.
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


def desired_groups(signals: TargetSignals, limits: TargetLimits, groups: int, fewest: int, most: int) -> int:
    """Where requests wait too long and too much of the groups' room is in use, as many groups as bring that share to
    its limit, at most twice as many at once; one fewer where the others have room for all that runs and nobody waits
    too long.

    Monotonic in the signals. While the running load stays the same, no decision is followed by its opposite.
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


class DraftPolicy:
    """Serve's controller makes one from `policy_kwargs`, as the replicas of the draft pool scale, and calls it.

    Each replica records its own busy share, and all of them what routers say.
    """

    def __init__(self, busy_share: float, late_share: float, min_gain: float) -> None:
        self._targets = DraftTargets(busy_share, late_share, min_gain)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: `ray.serve.config.AutoscalingContext`. Returns the number of replicas, and no state."""
        current = context.current_num_replicas
        recorded = context.aggregated_metrics or {}
        if not current or "busy_share" not in recorded:
            return context.target_num_replicas, {}  # nothing is recorded yet
        told = [max(recorded.get(name, {}).values(), default=0.0) for name in ("late_share", "gain", "loss")]
        signals = DraftSignals(min(1.0, sum(recorded["busy_share"].values()) / current), *told)
        fewest, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        desired = desired_workers(signals, self._targets, workers=current, fewest=fewest, most=most)
        return _replicas(context, desired), {}


class TargetPolicy:
    """Serve's controller makes one from `policy_kwargs`, as the target groups scale, and calls it.

    All groups record the same signals: what routers say of all of them.
    """

    def __init__(self, queue_s: float, used_share: float) -> None:
        self._limits = TargetLimits(queue_s, used_share)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: `ray.serve.config.AutoscalingContext`. Returns the number of replicas, and no state."""
        current = context.current_num_replicas
        recorded = context.aggregated_metrics or {}
        if not current or not all(recorded.get(name) for name in ("queue_s", "used_share")):
            return context.target_num_replicas, {}  # nothing is recorded yet
        queue_s, used_share = (sum(recorded[name].values()) / len(recorded[name]) for name in ("queue_s", "used_share"))
        fewest, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        signals = TargetSignals(queue_s, used_share)
        desired = desired_groups(signals, self._limits, groups=current, fewest=fewest, most=most)
        return _replicas(context, desired), {}


def _replicas(context: Any, desired: int) -> int:
    """Replicas that are being started were decided on before they could contribute, so they stay."""
    return max(desired, context.target_num_replicas) if desired > context.current_num_replicas else desired


def serve_autoscaling(
    replicas: tuple[int, int], scaling: AutoscalingConfig, policy: Callable[..., Any], limits: dict[str, float]
) -> ServeAutoscaling:
    """replicas: fewest and most. Serve constructs the policy with `limits` as its keyword arguments."""
    from ray.serve.config import AutoscalingConfig as ServeAutoscaling
    from ray.serve.config import AutoscalingPolicy

    fewest, most = replicas
    return ServeAutoscaling(
        min_replicas=fewest,
        initial_replicas=fewest,
        max_replicas=most,
        look_back_period_s=scaling.look_back_s,
        metrics_interval_s=scaling.look_back_s / _SIGNALS_IN_SIGHT,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        policy=AutoscalingPolicy(policy_function=policy, policy_kwargs=limits),
    )
