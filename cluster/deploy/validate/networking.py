"""Services, network policies and ingresses: what an API server checks beyond the schema."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from typing import Any

from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.labels import check_selector
from cluster.deploy.validate.naming import is_label, is_port, is_port_name
from cluster.deploy.validate.pods import one_of
from cluster.deploy.validate.tree import Manifest, items, listed, mapping, whole


def _service(manifest: Manifest) -> Iterator[Problem]:
    yield from check_service_spec(mapping(manifest, "spec"), ("spec",))


def check_service_spec(spec: Manifest, where: Location) -> Iterator[Problem]:
    """Mistakes in the `spec` of a Service, or of a service that a Ray cluster is given."""
    types = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
    yield from one_of(spec, "type", types, where)
    yield from one_of(spec, "sessionAffinity", ("None", "ClientIP"), where)
    yield from one_of(spec, "externalTrafficPolicy", ("Cluster", "Local"), where)
    yield from one_of(spec, "internalTrafficPolicy", ("Cluster", "Local"), where)
    ports = items(spec, "ports")
    names, numbers = set[str](), set[tuple[str, str]]()
    kind = spec.get("type", "ClusterIP")
    if kind == "ExternalName" and not spec.get("externalName"):
        yield Problem("service-type", (*where, "externalName"), "type ExternalName needs it")
    if kind != "ExternalName" and not ports and spec.get("clusterIP") != "None" and spec:
        yield Problem("service-type", (*where, "ports"), "there is no port")
    if spec.get("clusterIP") == "None" and kind in ("NodePort", "LoadBalancer"):
        yield Problem("service-type", (*where, "clusterIP"), f"type {kind} needs an address of its own")
    for index, port in ports:
        place = (*where, "ports", index)
        name = port.get("name")
        if len(ports) > 1 and not name:
            yield Problem("port-name-required", place, "no name, beside other ports")
        if isinstance(name, str) and name:
            if not is_label(name):
                yield Problem("port-name", (*place, "name"), f"{name!r} is not a DNS label")
            if name in names:
                yield Problem("port-name-unique", (*place, "name"), f"{name!r} names two ports")
            names.add(name)
        yield from one_of(port, "protocol", ("TCP", "UDP", "SCTP"), place)
        number = port.get("port")
        key = (str(number), str(port.get("protocol", "TCP")))
        if key in numbers:
            yield Problem("port-name-unique", (*place, "port"), f"{number} is given twice")
        numbers.add(key)
        for field in ("port", "targetPort", "nodePort"):
            value = port.get(field)
            if whole(value) is not None and not is_port(value) and not (field == "nodePort" and value == 0):
                yield Problem("port-range", (*place, field), f"{value} is not from 1 to 65535")
        target = port.get("targetPort")
        if isinstance(target, str) and not is_port_name(target):
            yield Problem("port-name", (*place, "targetPort"), f"{target!r} is not a port name")
        if port.get("nodePort") and kind == "ClusterIP":
            yield Problem("service-type", (*place, "nodePort"), "type ClusterIP has no port of nodes")


def _network_policy(manifest: Manifest) -> Iterator[Problem]:
    spec = mapping(manifest, "spec")
    yield from check_selector(spec.get("podSelector"), ("spec", "podSelector"))
    for index, name in enumerate(listed(spec, "policyTypes")):
        if name not in ("Ingress", "Egress"):
            yield Problem("enum", ("spec", "policyTypes", index), f"{name!r}; it must be Ingress or Egress")
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        for index, rule in items(spec, direction):
            place = ("spec", direction, index)
            for number, peer in items(rule, peers):
                yield from _peer(peer, (*place, peers, number))
            for number, port in items(rule, "ports"):
                yield from _policy_port(port, (*place, "ports", number))


def _peer(peer: Manifest, where: Location) -> Iterator[Problem]:
    if not any(peer.get(key) is not None for key in ("ipBlock", "podSelector", "namespaceSelector")):
        yield Problem("policy-peer", where, "it selects nothing: no podSelector, namespaceSelector or ipBlock")
    for key in ("podSelector", "namespaceSelector"):
        yield from check_selector(peer.get(key), (*where, key))
    block = mapping(peer, "ipBlock")
    if block and (peer.get("podSelector") is not None or peer.get("namespaceSelector") is not None):
        yield Problem("policy-peer", where, "ipBlock beside a selector")
    network = _network(block.get("cidr"))
    if block and network is None:
        yield Problem("cidr", (*where, "ipBlock", "cidr"), f"{block.get('cidr')!r} is no range of addresses")
    for index, text in enumerate(listed(block, "except")):
        hole = _network(text)
        if hole is None:
            yield Problem("cidr", (*where, "ipBlock", "except", index), f"{text!r} is no range of addresses")
        elif network is not None and (hole.version != network.version or not _strictly_within(hole, network)):
            yield Problem("cidr", (*where, "ipBlock", "except", index), f"{text} is not within {block['cidr']}")


def _network(text: object) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    if not isinstance(text, str) or "/" not in text:
        return None
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _strictly_within(hole: Any, network: Any) -> bool:
    return bool(hole != network and hole.subnet_of(network))


def _policy_port(port: Manifest, where: Location) -> Iterator[Problem]:
    yield from one_of(port, "protocol", ("TCP", "UDP", "SCTP"), where)
    first, last = port.get("port"), whole(port.get("endPort"))
    if whole(first) is not None and not is_port(first):
        yield Problem("port-range", (*where, "port"), f"{first} is not from 1 to 65535")
    if isinstance(first, str) and not is_port_name(first):
        yield Problem("port-name", (*where, "port"), f"{first!r} is not a port name")
    number = whole(first)
    if last is not None and (number is None or last < number or not is_port(last)):
        yield Problem("port-range", (*where, "endPort"), f"{last} is no end of a range that starts at {first}")


def _ingress(manifest: Manifest) -> Iterator[Problem]:
    spec = mapping(manifest, "spec")
    if not spec.get("rules") and not spec.get("defaultBackend"):
        yield Problem("ingress", ("spec",), "neither rules nor a defaultBackend")
    for index, rule in items(spec, "rules"):
        for number, path in items(rule, "http", "paths"):
            place = ("spec", "rules", index, "http", "paths", number)
            yield from one_of(path, "pathType", ("Exact", "Prefix", "ImplementationSpecific"), place)
            text = path.get("path")
            if isinstance(text, str) and not text.startswith("/"):
                yield Problem("ingress", (*place, "path"), f"{text!r} does not start with /")
            port = mapping(path, "backend", "service", "port")
            if mapping(path, "backend", "service") and len(port.keys() & {"name", "number"}) != 1:
                yield Problem("ingress", (*place, "backend", "service", "port"), "it needs a name or a number")


CHECKS: dict[str, Callable[[Manifest], Iterator[Problem]]] = {
    "Service": _service,
    "NetworkPolicy": _network_policy,
    "Ingress": _ingress,
}
