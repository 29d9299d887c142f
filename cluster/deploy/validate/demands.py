"""What the deployments of a Serve configuration ask of Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from actors.errors import InvalidRequest
from actors.options import DraftPoolOptions
from actors.pool_names import DRAFT_POOL, deployment_of
from cluster.config import ClusterConfig
from cluster.deploy.validate.capacity import Demand
from cluster.deploy.validate.tree import items, mapping

BUILDER = "cluster.app:build"  # whose arguments are a cluster configuration
DEPLOYMENTS = ("Gateway", "Router", DRAFT_POOL, "TargetGroup")


def cluster_demands(config: ClusterConfig) -> list[Demand]:
    """One replica of each deployment, but all target groups that there may be, and as many routers.
    Where the device is `auto`, it may turn out to be the CPU. Raises InvalidRequest for drafters that cannot be."""
    groups = config.target.most_groups
    rank = {"CPU": 1.0, "GPU": config.target.gpus or 1.0} if config.target.device.startswith("cuda") else {"CPU": 1.0}
    demands = [
        Demand("Gateway", ({"CPU": 0.1},)),
        Demand("Router", ({"CPU": 0.1},), replicas=groups),
        Demand("TargetGroup", ({"CPU": 0.1}, *(rank for _ in range(config.target.tensor_parallel))), True, groups),
    ]
    uses_first, uses_others = _used_pools(config)
    if uses_first and config.draft.workers > 0 and config.draft.model != "none":
        demands.append(_draft_demand(DRAFT_POOL, config.draft))
    if uses_others:
        demands += [_draft_demand(deployment_of(pool), options) for pool, options in config.more_drafts.items()]
    return demands


def _draft_demand(name: str, options: DraftPoolOptions) -> Demand:
    gpus = (options.gpus or 1.0) if options.device.startswith("cuda") else 0.0
    ranks = options.tensor_parallel
    return Demand(name, ({"CPU": 0.5 if ranks == 1 else 1.0, "GPU": gpus},) * ranks, on_one_node=ranks > 1)


def _used_pools(config: ClusterConfig) -> tuple[bool, bool]:
    """Whether the first draft model drafts, and whether the others do. Raises InvalidRequest."""
    if config.speculation.drafters == ("auto",):
        return True, True
    from actors.drafters.registry import DRAFT_MODEL, OUROBOROS  # take their time to load
    from cluster.named_drafters import named_drafters

    names = named_drafters(config)
    return not {DRAFT_MODEL, OUROBOROS}.isdisjoint(names), bool(names)


def demands_of(config: dict[str, Any]) -> Iterator[Demand]:
    """The demands of all applications, with what their deployments override."""
    for _, application in items(config, "applications"):
        own: dict[str, Demand] = {}
        if application.get("import_path") == BUILDER:
            try:
                parsed = ClusterConfig.model_validate(mapping(application, "args"))
                own = {demand.name: demand for demand in cluster_demands(parsed)}
            except (ValidationError, InvalidRequest):
                continue  # another check says so
        for _, deployment in items(application, "deployments"):
            name = str(deployment.get("name"))
            try:
                given = _overridden(name, deployment, own.get(name))
            except (TypeError, ValueError):
                continue  # the schema says so
            if given is not None:
                own[name] = given
        yield from own.values()


def _overridden(name: str, deployment: dict[str, Any], before: Demand | None) -> Demand | None:
    """None where a deployment says nothing of resources."""
    options = mapping(deployment, "ray_actor_options")
    replicas = 1 if before is None else before.replicas
    if bundles := items(deployment, "placement_group_bundles"):
        read = tuple({str(key): float(amount) for key, amount in bundle.items()} for _, bundle in bundles)
        return Demand(name, read, deployment.get("placement_group_strategy") == "STRICT_PACK", replicas)
    if not options or (before is not None and len(before.bundles) > 1):
        return None
    given = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), **mapping(options, "resources")}
    bundle = dict(before.bundles[0]) if before is not None else {}
    bundle |= {key: float(amount) for key, amount in given.items() if amount is not None}
    return Demand(name, (bundle,), replicas=replicas)
