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
from cluster.deploy.validate.ray_cluster import Group, groups_of, has_autoscaler
from cluster.deploy.validate.tree import mapping, whole

Resources = dict[str, float]

_EPSILON = 1e-6
_FOUND_BY_RAY = ("memory", "object_store_memory", "TPU", "HPU", "NPU", "neuron_cores")  # on every node, by itself


@dataclass(frozen=True, slots=True)
class Demand:
    """What replicas of a deployment ask for, each of them: bundles, each on one node."""

    name: str
    bundles: tuple[Resources, ...]
    on_one_node: bool = False  # all bundles of a replica
    replicas: int = 1

    @property
    def total(self) -> Resources:
        names = {name for bundle in self.bundles for name in bundle}
        return {name: sum(bundle.get(name, 0.0) for bundle in self.bundles) for name in names}


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
    return [_node_kind(group, _most_nodes(group, has_autoscaler(cluster))) for group in groups_of(cluster, where)]


def _most_nodes(group: Group, autoscales: bool) -> int:
    if group.is_head:
        return 1
    if autoscales:
        most = whole(group.spec.get("maxReplicas"))
        replicas = 10**6 if most is None else most
    else:
        replicas = max(whole(group.spec.get(key)) or 0 for key in ("replicas", "minReplicas"))
    return max(0, replicas) * max(1, whole(group.spec.get("numOfHosts")) or 1)


def _node_kind(group: Group, count: int) -> NodeKind:
    parameters, own = mapping(group.spec, "rayStartParams"), mapping(group.spec, "resources")
    asked = mapping(group.container, "resources")
    limits, requests = mapping(asked, "limits"), mapping(asked, "requests")
    devices = [value for key, value in limits.items() if str(key).endswith("gpu")]
    given: dict[str, object] = {
        "CPU": parameters.get("num-cpus") or own.get("CPU") or limits.get("cpu") or requests.get("cpu"),
        "GPU": parameters.get("num-gpus") or own.get("GPU") or (devices[0] if devices else None),
        **{str(key): value for key, value in own.items() if key not in ("CPU", "GPU")},
    }
    unknown = set[str]()
    try:
        given |= json.loads(str(parameters.get("resources") or "{}").strip("'\"").replace('\\"', '"'))
    except (ValueError, TypeError):
        unknown.add("*")
    values = {name: parse_quantity(value) for name, value in given.items()}
    # Parts of GPUs, claims of devices and runtime classes may bring some that Ray then finds.
    may_have = any("/" in str(key) for key in limits) or asked.get("claims")
    may_have = may_have or mapping(group.spec, "template", "spec").get("runtimeClassName")
    unknown |= {name for name in ("CPU", *(["GPU"] if may_have else [])) if values[name] is None}
    found = {name: float(v.to_integral_value(ROUND_CEILING)) for name, v in values.items() if v is not None}
    return NodeKind(group.name, found, frozenset(unknown), count)


def check_capacity(demands: list[Demand], nodes: list[NodeKind], where: Location) -> Iterator[Problem]:
    """All replicas of the demands, on all of the nodes."""
    if any("*" in node.found_by_ray for node in nodes):
        return
    homeless = [demand for demand in demands if not _fits_somewhere(demand, nodes)]
    for demand in homeless:
        what = f"one replica of {demand.name} needs {_shown(demand)}; no group has such nodes"
        yield Problem("group-resources", where, f"{what}: {_nodes_shown(nodes)}")
    if homeless:
        return
    for name in sorted({key for demand in demands for key in demand.total}):
        asked = sum(demand.replicas * demand.total.get(name, 0.0) for demand in demands)
        there = sum(node.of(name) * node.count for node in nodes if node.count)
        if asked > there + _EPSILON:
            parts = [
                "one replica of every deployment",
                *(f"{d.replicas} of {d.name}" for d in demands if d.replicas > 1),
            ]
            what = f"{', '.join(parts)} needs {asked:g} {name}; all groups at their largest have {there:g}"
            yield Problem("group-resources", where, what)
    for demand in demands:
        held = sum(node.count * _held_by(node, demand) for node in nodes if node.count)
        if demand.on_one_node and held < demand.replicas:
            what = f"{demand.replicas} replicas of {demand.name} need {_shown(demand)} each; there is room for {held:g}"
            yield Problem("group-resources", where, f"{what}: {_nodes_shown(nodes)}")


def _held_by(node: NodeKind, demand: Demand) -> float:
    """Replicas of a demand that is on one node, on a node that is empty."""
    fit = (node.of(name) / amount + _EPSILON for name, amount in demand.total.items() if amount)
    least = min(fit, default=math.inf)
    return least if math.isinf(least) else math.floor(least)


def _fits_somewhere(demand: Demand, nodes: list[NodeKind]) -> bool:
    bundles = (demand.total,) if demand.on_one_node else demand.bundles
    return all(
        any(node.count and all(amount <= node.of(name) + _EPSILON for name, amount in bundle.items()) for node in nodes)
        for bundle in bundles
    )


def _shown(demand: Demand) -> str:
    texts = [" ".join(f"{amount:g} {name}" for name, amount in bundle.items() if amount) for bundle in demand.bundles]
    parts = [f"{texts.count(text)} x ({text or 'nothing'})" for text in dict.fromkeys(texts)]
    return " + ".join(parts) + (" on one node" if demand.on_one_node else "")


def _nodes_shown(nodes: list[NodeKind]) -> str:
    names = sorted({"CPU", "GPU"}.union(*(node.resources for node in nodes)))
    return ", ".join(
        f"{node.group} ({', '.join(f'{node.of(name):g} {name}' for name in names if node.of(name)) or 'nothing'})"
        for node in nodes
    )
