"""Autoscaling of draft workers and target groups: limits, decisions, and Ray Serve's policies.

ray is imported only where Serve's settings are made: the configuration imports this module.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from actors.workers.demand import TargetDemand
from cache_service.options import Options

_ROOM = 0.7  # a draft worker may go if the others stay below this part of the wanted busy share
_SIGNALS_IN_SIGHT = 5  # signals of a replica within `look_back_s`, at least
_HELD_SEEN_S = 5.0  # within which a number that was set by hand takes effect
MOST_REPLICAS = 1024  # that can be set by hand


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


def desired_workers(signals: DraftSignals, targets: DraftPolicy, workers: int, fewest: int, most: int) -> int:
    """More draft workers, at most twice as many, if they are too busy or too late and the planner estimates that one
    more pays. One fewer if the others have room for its work and the loss is small.

    Monotonic in the signals. With min_gain above 0 decisions do not alternate: a worker goes at half of the gain at
    which it comes.
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


def desired_groups(signals: TargetDemand, limits: TargetPolicy, groups: int, fewest: int, most: int) -> int:
    """If requests wait too long and the groups' room is used above its limit: as many groups as bring the share to the
    limit, at most twice as many. One fewer if the others have room for all that runs and no request waits too long.

    Monotonic in the signals. Under a constant load, no decision is followed by its opposite.
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


@dataclass(frozen=True, kw_only=True)
class _Policy:
    """Serve's controller makes one from `policy_kwargs` and calls it: replicas come and go by themselves between
    `fewest` and `most`, after their signals have asked for it for so long. A number that was set by hand counts more,
    and at once."""

    fewest: int = 1
    most: int = MOST_REPLICAS
    upscale_delay_s: float = 0.0
    downscale_delay_s: float = 0.0

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: `ray.serve.config.AutoscalingContext`. Returns the number of replicas, and state for the next
        call."""
        return self.decide(context, time.time())

    def decide(self, context: Any, now: float) -> tuple[int, dict[str, Any]]:
        """now: seconds of a clock that is continuous between calls."""
        # Serve's bounds are the bounds of numbers set by hand. During an incremental upgrade each of the two clusters
        # has a share of them.
        share = context.capacity_adjusted_max_replicas / MOST_REPLICAS

        def adjusted(number: int) -> int:
            return max(1, math.floor(number * share + 0.5)) if share else 0

        if held := self._allowed(_held(context)):
            return adjusted(held), {}
        fewest, most = adjusted(self.fewest), adjusted(self.most)
        target = context.target_num_replicas
        wanted = self._desired(context, fewest, most) if context.current_num_replicas else None
        if wanted is None:  # nothing is recorded yet
            return max(fewest, min(most, target)), {}
        if wanted > context.current_num_replicas:  # what is being started could not contribute to the signals yet
            wanted = max(wanted, min(most, target))
        return self._delayed(wanted, context, now)

    def _allowed(self, held: int) -> int:
        """A number that was set by hand, cut to what there may be."""
        return held

    def _desired(self, context: Any, fewest: int, most: int) -> int | None:
        """None: nothing is recorded yet."""
        raise NotImplementedError

    def _delayed(self, wanted: int, context: Any, now: float) -> tuple[int, dict[str, Any]]:
        """Serve's delays are 0, so that numbers set by hand take effect at once."""
        target, before = context.target_num_replicas, context.policy_state
        if wanted == target:
            return target, {}
        delay_s = self.upscale_delay_s if wanted > target else self.downscale_delay_s
        since = before["since"] if before.get("is_more") == (wanted > target) else now
        if now - since >= delay_s:
            return wanted, {}
        return target, {"is_more": wanted > target, "since": since}


def _held(context: Any) -> int:
    """The number set by hand, from the latest record; 0: none is set."""
    series = [each for each in (context.raw_metrics or {}).get("held", {}).values() if each]
    newest = max((each[-1] for each in series), key=lambda value: value.timestamp, default=None)
    return int(newest.value) if newest is not None else 0


@dataclass(frozen=True)
class DraftPolicy(_Policy):
    """Each replica of the draft pool records its busy share. All record the routers' signals and the number set by
    hand."""

    busy_share: float  # wanted share
    late_share: float  # upper limit
    min_gain: float  # relative gain in tokens a second that one more worker must bring

    def _desired(self, context: Any, fewest: int, most: int) -> int | None:
        recorded, current = context.aggregated_metrics or {}, context.current_num_replicas
        if "busy_share" not in recorded:
            return None
        told = [max(recorded.get(name, {}).values(), default=0.0) for name in ("late_share", "gain", "loss")]
        signals = DraftSignals(min(1.0, sum(recorded["busy_share"].values()) / current), *told)
        return desired_workers(signals, self, workers=current, fewest=fewest, most=most)


@dataclass(frozen=True)
class TargetPolicy(_Policy):
    """All groups record the same signals: those of the routers for all groups, and the number set by hand."""

    queue_s: float  # time that requests may wait for their first round
    used_share: float  # groups are added above it; one is removed only if the others stay below it

    def _allowed(self, held: int) -> int:
        """Each group needs a router, and an upgrade in place may have left fewer routers."""
        return min(held, self.most)

    def _desired(self, context: Any, fewest: int, most: int) -> int | None:
        recorded = context.aggregated_metrics or {}
        if not all(recorded.get(name) for name in ("queue_s", "used_share")):
            return None
        queue_s, used_share = (sum(recorded[name].values()) / len(recorded[name]) for name in ("queue_s", "used_share"))
        signals = TargetDemand(queue_s, used_share)
        return desired_groups(signals, self, groups=context.current_num_replicas, fewest=fewest, most=most)


def replica_options(
    fewest: int, most: int, scaling: AutoscalingConfig, policy: Callable[..., Any], limits: dict[str, float]
) -> dict[str, Any]:
    """Options of a deployment: from `fewest` to `most` replicas by a policy, which Serve constructs with their bounds
    and `limits` as its keyword arguments, or as many as were set by hand."""
    from ray.serve.config import AutoscalingConfig as ServeAutoscaling
    from ray.serve.config import AutoscalingPolicy

    own: dict[str, float] = {"fewest": fewest, "most": most}
    own |= {"upscale_delay_s": scaling.upscale_delay_s, "downscale_delay_s": scaling.downscale_delay_s}
    autoscaling = ServeAutoscaling(
        min_replicas=1,
        initial_replicas=fewest,
        max_replicas=MOST_REPLICAS,
        look_back_period_s=scaling.look_back_s,
        metrics_interval_s=min(_HELD_SEEN_S, scaling.look_back_s / _SIGNALS_IN_SIGHT),
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        policy=AutoscalingPolicy(policy_function=policy, policy_kwargs={**own, **limits}),
    )
    return {"autoscaling_config": autoscaling}
