"""What the ranks of a group, target or draft, ask of Ray."""

from __future__ import annotations

from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.options import DraftPoolOptions, TargetGroupOptions
from actors.workers.gpus import SEE_ALL_GPUS


def rank_bundle(options: TargetGroupOptions | DraftPoolOptions) -> dict[str, float]:
    """Resources of a rank in its group's placement group."""
    return {"GPU": options.gpus or 1.0, "CPU": 1.0} if options.device.startswith("cuda") else {"CPU": 1.0}


def rank_options(
    options: TargetGroupOptions | DraftPoolOptions, group: PlacementGroup | None, bundle: int
) -> dict[str, Any]:
    """Ray's options of a rank's actor, in this bundle of the placement group if there is one."""
    on_gpu = options.device.startswith("cuda")
    asked: dict[str, Any] = {"num_cpus": 0 if on_gpu else 1, "max_concurrency": 4}
    if on_gpu:
        asked |= {"num_gpus": options.gpus or 1.0, "runtime_env": {"env_vars": SEE_ALL_GPUS}}
    if group is not None:
        asked["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, bundle)
    return asked
