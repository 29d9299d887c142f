"""What the deployments of our own Serve application ask of Ray, by its configuration."""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.deploy.validate.capacity import Demand

DEPLOYMENTS = ("Gateway", "Router", "DraftPool", "TargetGroup")


def cluster_demands(config: ClusterConfig) -> list[Demand]:
    """One replica of each deployment, but all target groups that there may be, and as many routers.
    Where the device is `auto`, it may turn out to be the CPU."""
    groups = config.target.most_groups
    rank = {"CPU": 1.0, "GPU": 1.0} if config.target.device.startswith("cuda") else {"CPU": 1.0}
    demands = [
        Demand("Gateway", ({"CPU": 0.1},)),
        Demand("Router", ({"CPU": 0.1},), replicas=groups),
        Demand("TargetGroup", ({"CPU": 0.1}, *(rank for _ in range(config.target.tensor_parallel))), replicas=groups),
    ]
    if config.draft.workers > 0 and config.draft.model != "none":
        gpus = 1.0 if config.draft.device.startswith("cuda") else 0.0
        demands.append(Demand("DraftPool", ({"CPU": 0.5, "GPU": gpus},)))
    return demands
