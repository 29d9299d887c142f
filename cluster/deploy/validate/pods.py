"""The pods that a set of manifests makes, and what is wrong inside of one: an API server sees the pods of a Ray group
only when KubeRay makes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cluster.deploy.validate.documents import Document
from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.quantity import parse_quantity
from cluster.deploy.validate.ray_cluster import cluster_of, groups_of, is_ray
from cluster.deploy.validate.tree import at, items, listed, mapping, scalar, whole

_WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")
# Where a kind has its template of pods; a Pod is one itself.
_TEMPLATES: dict[str, Location] = {
    **dict.fromkeys((*_WORKLOADS, "Job"), ("spec", "template")),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
    "Pod": (),
}
_GENERATED = ("ray.io/cluster", "ray.io/identifier", "ray.io/serve")  # labels whose values are known later


@dataclass(frozen=True, slots=True)
class Pods:
    """Those of a workload or of a group of a Ray cluster. A label's value None is not known yet."""

    document: Document
    where: Location  # of the template
    labels: dict[str, str | None]
    group: str = ""
    at_least: int = 1

    @property
    def spec(self) -> dict[str, Any]:
        return mapping(self.document.value, *self.where, "spec")

    @property
    def namespace(self) -> str:
        return namespace_of(self.document)

    @property
    def name(self) -> str:
        return f"{self.document.name}, group {self.group}" if self.group else self.document.name

    def containers(self) -> list[tuple[Location, dict[str, Any]]]:
        return [
            ((*self.where, "spec", key, index), container)
            for key in ("initContainers", "containers")
            for index, container in items(self.spec, key)
        ]

    def ports(self) -> dict[int | None, str | int | None]:
        """Names by number."""
        ports = [port for _, container in self.containers() for _, port in items(container, "ports")]
        return {whole(port.get("containerPort")): scalar(port.get("name")) for port in ports}

    def number_of(self, port: object) -> int | None:
        """The number of a port that is given by its name or its number."""
        named = {name: number for number, name in self.ports().items() if name is not None}
        return named.get(port) if isinstance(port, str) else whole(port)


def namespace_of(document: Document) -> str:
    return str(mapping(document.value, "metadata").get("namespace") or "")


def pods_of(documents: list[Document]) -> list[Pods]:
    return [pods for document in documents for pods in _pods_of(document)]


def _pods_of(document: Document) -> Iterator[Pods]:
    if is_ray(document.value):
        for group in groups_of(*cluster_of(document.value)):
            own: dict[str, str | None] = {
                **dict.fromkeys(_GENERATED),
                "ray.io/is-ray-node": "yes",
                "app.kubernetes.io/name": "kuberay",
            }
            given = mapping(group.spec, "template", "metadata", "labels")
            kind, name = ("head", "headgroup") if group.is_head else ("worker", group.name)
            fixed = {"ray.io/node-type": kind, "ray.io/group": name}
            least = whole(group.spec.get("minReplicas")) or 0
            count = 1 if group.is_head else least * (whole(group.spec.get("numOfHosts")) or 1)
            yield Pods(document, (*group.where, "template"), {**own, **given, **fixed}, group.name, count)
    elif (where := _TEMPLATES.get(str(document.value.get("kind")))) is not None:
        labels = mapping(document.value, *where, "metadata", "labels")
        replicas = whole(at(document.value, "spec", "replicas"))
        is_test = "helm.sh/hook" in mapping(document.value, "metadata", "annotations")
        yield Pods(document, where, dict(labels), at_least=0 if is_test else 1 if replicas is None else replicas)


def selects(selector: object, labels: dict[str, str | None]) -> bool:
    """Whether labels may be what a selector with matchLabels and matchExpressions looks for."""
    for key, value in mapping(selector, "matchLabels").items():
        if key not in labels or labels[key] not in (None, value):
            return False
    for _, expression in items(selector, "matchExpressions"):
        key, operator, values = str(expression.get("key")), expression.get("operator"), listed(expression, "values")
        is_there, own = key in labels, labels.get(key)
        if is_there and own is None:
            continue
        if (operator == "In" and own not in values) or (operator == "NotIn" and is_there and own in values):
            return False
        if (operator == "Exists" and not is_there) or (operator == "DoesNotExist" and is_there):
            return False
    return True


def check_pods(pods: Pods) -> Iterator[Problem]:
    claims = [
        mapping(claim, "metadata").get("name")
        for _, claim in items(pods.document.value, "spec", "volumeClaimTemplates")
    ]
    volumes = {str(volume.get("name")) for _, volume in items(pods.spec, "volumes")} | set(map(str, claims))
    context = mapping(pods.spec, "securityContext")
    names = set[str]()
    for where, container in pods.containers():
        if (name := str(container.get("name"))) in names:
            yield Problem("list-unique", (*where, "name"), f"{name!r} names two containers of the pod")
        names.add(name)
        for index, mount in items(container, "volumeMounts"):
            if str(mount.get("name")) not in volumes:
                what = f"the pod has no volume {mount.get('name')!r}"
                yield Problem("mount-volume", (*where, "volumeMounts", index, "name"), what)
        ports = [port["name"] for _, port in items(container, "ports") if isinstance(port.get("name"), str)]
        if len(set(ports)) < len(ports):
            yield Problem("list-unique", (*where, "ports"), f"two ports of one name: {', '.join(ports)}")
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            for handler in ("httpGet", "tcpSocket"):
                port = at(container, probe, handler, "port")
                if isinstance(port, str) and port not in ports:
                    place = (*where, probe, handler, "port")
                    yield Problem("probe-port", place, f"the container has no port named {port!r}")
        yield from check_resources(mapping(container, "resources"), (*where, "resources"))
        yield from _check_end(pods, container, where)
        own = mapping(container, "securityContext")
        if own.get("runAsNonRoot", context.get("runAsNonRoot")) and own.get("runAsUser", context.get("runAsUser")) == 0:
            yield Problem("security-context", (*where, "securityContext"), "runAsNonRoot with runAsUser 0")
    labels = {key: value for key, value in pods.labels.items() if key not in _GENERATED}
    selector = at(pods.document.value, "spec", "selector")
    if pods.document.value.get("kind") in _WORKLOADS and selector and not selects(selector, labels):
        yield Problem("selects-nothing", ("spec", "selector"), "it does not select the pods of its own template")
    for index, constraint in items(pods.spec, "topologySpreadConstraints"):
        if (selector := constraint.get("labelSelector")) and not selects(selector, labels):
            place = (*pods.where, "spec", "topologySpreadConstraints", index, "labelSelector")
            yield Problem("selects-nothing", place, "it does not select the pod itself")


def _check_end(pods: Pods, container: dict[str, Any], where: Location) -> Iterator[Problem]:
    """The preStop hook within the time that the pod has to end in."""
    grace = whole(pods.spec.get("terminationGracePeriodSeconds"))
    hook = mapping(container, "lifecycle", "preStop")
    command = [str(part) for part in listed(hook, "exec", "command")]
    limit = next((later for option, later in pairwise(command) if option == "--limit-s"), None)
    seconds = parse_quantity(at(hook, "sleep", "seconds") if limit is None else limit)
    if seconds is not None and seconds > (30 if grace is None else grace):
        what = f"takes up to {seconds:f} s; the pod has {30 if grace is None else grace} s to end in"
        yield Problem("grace-period", (*where, "lifecycle", "preStop"), what)


def _amounts(resources: dict[str, Any], kind: str) -> list[tuple[str, Any]]:
    return [(str(name), text) for name, text in mapping(resources, kind).items()]


def check_resources(resources: dict[str, Any], where: Location) -> Iterator[Problem]:
    limits = mapping(resources, "limits")
    for name, text in _amounts(resources, "requests"):
        is_device = "/" in name or name.startswith("hugepages-")
        request, limit = parse_quantity(text), parse_quantity(limits.get(name))
        if is_device and (limit is None or limit != request):
            what = f"request {text} of {name}, limit {limits.get(name)}; of devices they must be the same"
            yield Problem("resource-limit", (*where, "requests", name), what)
        elif request is not None and limit is not None and request > limit:
            what = f"request {text} of {name} is over the limit {limits[name]}"
            yield Problem("resource-limit", (*where, "requests", name), what)
    for kind in ("requests", "limits"):
        for name, text in _amounts(resources, kind):
            value = parse_quantity(text)
            is_whole = "/" in name or name == "memory"
            if value is not None and (value < 0 or (is_whole and value != value.to_integral_value())):
                yield Problem(
                    "resource-limit", (*where, kind, name), f"{text!r} of {name}; bytes and devices come whole"
                )
            if "/" not in name and name not in ("cpu", "memory", "ephemeral-storage") and "hugepages-" not in name:
                yield Problem("resource-name", (*where, kind, str(name)), f"{name!r} is no resource of a container")
