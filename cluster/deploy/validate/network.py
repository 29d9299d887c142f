"""Whether network policies let through what Ray, its operator and the caches need.

A flow is let through where no policy selects its source for egress, or one of them allows it, and the same holds for
its destination and ingress. Traffic counts as allowed if the files cannot decide it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.deploy.validate.documents import Document
from cluster.deploy.validate.finding import Problem
from cluster.deploy.validate.pods import Pods, namespace_of, selects
from cluster.deploy.validate.ray_cluster import cluster_of, has_autoscaler
from cluster.deploy.validate.tree import items, listed, mapping, whole

GCS_PORT = 6379
_DASHBOARD_PORT = 8265
_DNS_PORT = 53


@dataclass(frozen=True, slots=True)
class Outside:
    """Something that is not of the set: the DNS server, the API server, KubeRay's operator."""

    name: str


Peer = Pods | Outside


def check_ray_network(documents: list[Document], groups: list[Pods]) -> Iterator[tuple[Document, Problem]]:
    """The flows without which the pods of one Ray cluster are none."""
    policies = [document for document in documents if document.value.get("kind") == "NetworkPolicy"]
    if not policies or not groups:
        return
    head = groups[0]
    flows: list[tuple[Peer, Peer, int | None]] = []
    for pods in groups:
        flows.append((pods, Outside("the DNS server"), _DNS_PORT))
        if pods is not head:
            flows += [(pods, head, GCS_PORT), (head, pods, None)]
        flows += [(pods, other, None) for other in groups]
    flows.append((Outside("KubeRay's operator"), head, _DASHBOARD_PORT))
    told = set[tuple[str, str, str]]()
    for source, target, port in flows:
        why = cut(policies, source, target, port)
        if why is not None and (key := (source.name, target.name, why)) not in told:
            told.add(key)
            yield head.document, _problem(head, source, target, port, why)
    if has_autoscaler(cluster_of(head.document.value)[0]):
        server = Outside("the API server")
        reasons = [cut(policies, head, server, port) for port in (443, 6443)]
        if all(reasons):
            yield head.document, _problem(head, head, server, 443, str(reasons[0]))


def check_flow(documents: list[Document], source: Pods, target: Pods, port: int) -> Iterator[tuple[Document, Problem]]:
    policies = [document for document in documents if document.value.get("kind") == "NetworkPolicy"]
    if (why := cut(policies, source, target, port)) is not None:
        yield source.document, _problem(source, source, target, port, why)


def _problem(of: Pods, source: Peer, target: Peer, port: int | None, why: str) -> Problem:
    shown = "every port, as Ray's processes take any" if port is None else f"port {port}"
    return Problem("network-cut", of.where, f"{source.name} must reach {target.name} at {shown}: {why}")


def cut(policies: list[Document], source: Peer, target: Peer, port: int | None) -> str | None:
    """Why a flow is not let through; None: it is. `port` None stands for every port."""
    for here, there, direction, peers in ((source, target, "Egress", "to"), (target, source, "Ingress", "from")):
        if isinstance(here, Outside):
            continue
        applying = [policy for policy in policies if _applies(policy, here, direction)]
        rules = [rule for policy in applying for _, rule in items(policy.value, "spec", direction.lower())]
        if applying and not any(
            _has_peer(rule, peers, here, there) and _has_port(rule, port, target) for rule in rules
        ):
            names = ", ".join(str(mapping(policy.value, "metadata").get("name")) for policy in applying)
            return f"no {direction.lower()} rule of {names} lets it through"
    return None


def _applies(policy: Document, pods: Pods, direction: str) -> bool:
    spec = mapping(policy.value, "spec")
    types = listed(spec, "policyTypes") or ["Ingress", *(["Egress"] if "egress" in spec else [])]
    is_near = namespace_of(policy) == pods.namespace
    return is_near and direction in types and selects(spec.get("podSelector"), pods.labels)


def _has_peer(rule: dict[str, Any], key: str, here: Pods, there: Peer) -> bool:
    given = [peer for _, peer in items(rule, key)]
    return not given or any(_is_peer(peer, here, there) for peer in given)


def _is_peer(peer: dict[str, Any], here: Pods, there: Peer) -> bool:
    spaces = peer.get("namespaceSelector")
    if "ipBlock" in peer:
        return True  # whose addresses they are is known later
    if isinstance(there, Outside):
        return spaces is not None
    if spaces is None and here.namespace != there.namespace:
        return False
    if spaces is not None and there.namespace:
        names = {"kubernetes.io/metadata.name": there.namespace}
        wanted = {**mapping(spaces, "matchLabels")} | {
            str(e.get("key")): "" for _, e in items(spaces, "matchExpressions")
        }
        if wanted.keys() <= names.keys() and not selects(spaces, dict(names)):
            return False
    return peer.get("podSelector") is None or selects(peer["podSelector"], there.labels)


def _has_port(rule: dict[str, Any], port: int | None, target: Peer) -> bool:
    given = [each for _, each in items(rule, "ports")]
    if not given:
        return True
    protocol = "UDP" if port == _DNS_PORT else "TCP"
    for each in given:
        if each.get("protocol", "TCP") != protocol:
            continue
        if each.get("port") is None:
            return True
        first = target.number_of(each["port"]) if isinstance(target, Pods) else whole(each["port"])
        last = whole(each.get("endPort")) or first
        if first is None or last is None:
            if isinstance(target, Outside):
                return True  # what is named so there is not known
        elif (first <= 1024 and last == 65_535) if port is None else first <= port <= last:
            return True
    return False
