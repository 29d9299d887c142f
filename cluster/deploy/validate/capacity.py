"""Whether the nodes of a Ray cluster can hold every deployment at once: one replica each, or as many as it must have.

It errs on the side of silence: what it reports cannot be placed, however Ray packs it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING
from typing import Any

from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.quantity import parse_quantity
from cluster.deploy.validate.ray_cluster import groups_of, has_autoscaler
from cluster.deploy.validate.resources import is_extended
from cluster.deploy.validate.tree import mapping, whole

Resources = dict[str, float]

_FOUND_BY_RAY = ("memory", "object_store_memory", "TPU", "HPU", "NPU", "neuron_cores")  # on every node, by itself


@dataclass(frozen=True, slots=True)
class Demand:
    """What replicas of a deployment ask for, each of them: bundles, each on one node."""

    name: str
    bundles: tuple[Resources, ...]
    on_one_node: bool = False  # all bundles of a replica
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class NodeKind:
    """The nodes of a group. A resource that is not in `resources` is 0, unless the group leaves it to Ray to find."""

    group: str
    resources: Resources
    found_by_ray: frozenset[str]
    count: int

    def of(self, name: str) -> float:
        if name in self.found_by_ray or name.startswith(_FOUND_BY_RAY) or ":" in name:
            return math.inf
        return self.resources.get(name, 0.0)


def node_kinds(cluster: dict[str, Any], where: Location) -> list[NodeKind]:
    """One for every group, with as many nodes as there may ever be of it."""
    kinds = []
    for group in groups_of(cluster, where):
        count = 1
        if not group.is_head:
            key = "maxReplicas" if has_autoscaler(cluster) else "replicas"
            given = whole(group.spec.get(key))
            replicas = given if given is not None else (10**6 if key == "maxReplicas" else 0)
            if key == "replicas":
                replicas = max(replicas, whole(group.spec.get("minReplicas")) or 0)
            count = max(0, replicas) * max(1, whole(group.spec.get("numOfHosts")) or 1)
        kinds.append(_node_kind(group.name, group.spec, group.container, count))
    return kinds


def _node_kind(name: str, spec: dict[str, Any], container: dict[str, Any], count: int) -> NodeKind:
    parameters, own = mapping(spec, "rayStartParams"), mapping(spec, "resources")
    limits, requests = mapping(container, "resources", "limits"), mapping(container, "resources", "requests")
    found: Resources = {}
    unknown = set[str]()
    cpus = parameters.get("num-cpus") or own.get("CPU") or limits.get("cpu") or requests.get("cpu")
    _enter(found, unknown, "CPU", cpus, missing=math.inf)
    devices = [value for key, value in limits.items() if str(key).endswith("gpu")]
    gpus = parameters.get("num-gpus") or own.get("GPU") or (devices[0] if devices else None)
    # Parts of GPUs, claims of devices and runtime classes may bring some that Ray then finds.
    may_have = any(is_extended(str(key)) for key in limits) or bool(mapping(container, "resources").get("claims"))
    may_have = may_have or bool(mapping(spec, "template", "spec").get("runtimeClassName"))
    _enter(found, unknown, "GPU", gpus, missing=math.inf if may_have else 0.0)
    custom = parameters.get("resources")
    if isinstance(custom, str) and custom:
        try:
            values = json.loads(custom.strip("'").strip('"').replace('\\"', '"'))
            found |= {str(key): float(value) for key, value in values.items()}
        except (ValueError, AttributeError, TypeError):
            unknown.add("*")
    for key, value in own.items():
        if key not in ("CPU", "GPU"):
            _enter(found, unknown, str(key), value, missing=0.0)
    return NodeKind(name, found, frozenset(unknown), count)


def _enter(found: Resources, unknown: set[str], name: str, text: object, missing: float) -> None:
    value = parse_quantity(text)
    if value is not None:
        found[name] = float(value.to_integral_value(ROUND_CEILING))
    elif missing:
        unknown.add(name)


def check_capacity(demands: list[Demand], nodes: list[NodeKind], where: Location) -> Iterator[Problem]:
    """All replicas of the demands, on all of the nodes."""
    if any("*" in node.found_by_ray for node in nodes):
        return
    whole_demands = [demand for demand in demands if _fits_somewhere(demand, nodes)]
    for demand in demands:
        if demand not in whole_demands:
            what = f"one replica of {demand.name} needs {_shown(demand)}; no group has such nodes"
            yield Problem("group-resources", where, f"{what}: {_nodes_shown(nodes)}")
    if len(whole_demands) < len(demands):
        return
    for name in sorted({key for demand in demands for bundle in demand.bundles for key in bundle}):
        asked = sum(demand.replicas * bundle.get(name, 0.0) for demand in demands for bundle in demand.bundles)
        there = sum(node.of(name) * node.count for node in nodes if node.count)
        if asked > there + 1e-6:
            what = f"{_counted(demands)} needs {asked:g} {name}; all groups at their largest have {there:g}"
            yield Problem("group-resources", where, what)
    for demand in demands:
        held = sum(node.count * _held_by(node, demand) for node in nodes if node.count)
        if demand.on_one_node and held < demand.replicas:
            what = f"{demand.replicas} replicas of {demand.name} need {_shown(demand)} each; there is room for {held:g}"
            yield Problem("group-resources", where, f"{what}: {_nodes_shown(nodes)}")


def _held_by(node: NodeKind, demand: Demand) -> float:
    """Replicas of a demand that is on one node, on a node that is empty."""
    names = {name for bundle in demand.bundles for name in bundle}
    asked = {name: sum(bundle.get(name, 0.0) for bundle in demand.bundles) for name in names}
    fit = (node.of(name) / amount + 1e-6 for name, amount in asked.items() if amount)
    least = min(fit, default=math.inf)
    return least if math.isinf(least) else math.floor(least)


def _counted(demands: list[Demand]) -> str:
    several = [f"{demand.replicas} of {demand.name}" for demand in demands if demand.replicas > 1]
    return f"one replica of every deployment{', ' if several else ''}{', '.join(several)}"


def _fits_somewhere(demand: Demand, nodes: list[NodeKind]) -> bool:
    bundles = demand.bundles
    if demand.on_one_node:
        names = {name for bundle in bundles for name in bundle}
        bundles = ({name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names},)
    return all(
        any(node.count and all(amount <= node.of(name) + 1e-6 for name, amount in bundle.items()) for node in nodes)
        for bundle in bundles
    )


def _shown(demand: Demand) -> str:
    bundles: dict[str, int] = {}
    for bundle in demand.bundles:
        text = " ".join(f"{amount:g} {name}" for name, amount in bundle.items() if amount) or "nothing"
        bundles[text] = bundles.get(text, 0) + 1
    parts = [text if count == 1 else f"{count} x ({text})" for text, count in bundles.items()]
    return " + ".join(parts) + (" on one node" if demand.on_one_node else "")


def _nodes_shown(nodes: list[NodeKind]) -> str:
    parts = []
    for node in nodes:
        names = sorted({"CPU", "GPU", *node.resources})
        amounts = [f"{node.of(name):g} {name}" for name in names if node.of(name)]
        parts.append(f"{node.group} ({', '.join(amounts) or 'nothing'})")
    return ", ".join(parts)
