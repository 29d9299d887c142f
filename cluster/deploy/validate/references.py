"""What one object of a set says of another: selectors, ports, names."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any
from urllib.parse import urlsplit

from cluster.deploy.validate.documents import Document, read_documents
from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.network import check_flow, check_ray_network
from cluster.deploy.validate.pods import Pods, check_pods, check_resources, namespace_of, pods_of, selects
from cluster.deploy.validate.ray_cluster import cluster_of, is_ray
from cluster.deploy.validate.suggestion import did_you_mean
from cluster.deploy.validate.tree import at, items, listed, mapping, scalar, whole

Found = Iterator[tuple[Document, Problem]]

# Kinds that choose pods, and where they say which.
_SELECTORS: dict[str, Location] = {
    "Service": ("spec", "selector"),
    "PodDisruptionBudget": ("spec", "selector"),
    "NetworkPolicy": ("spec", "podSelector"),
    "PodMonitor": ("spec", "selector"),
}
# Others may have kinds of these names.
_GROUPS = (
    "", "apps", "autoscaling", "batch", "gateway.networking.k8s.io", "monitoring.coreos.com", "networking.k8s.io",
    "policy", "ray.io", "scheduling.k8s.io",
)  # fmt: skip
_WITHOUT_NAMESPACE = ("PriorityClass", "Namespace", "ClusterRole", "GatewayClass")
_SECRET = ("valueFrom", "secretKeyRef", "name")
_ROUTES = ("HTTPRoute", "GRPCRoute", "TCPRoute", "TLSRoute", "UDPRoute")


class References:
    """References between all documents of a set; `check` yields what is wrong with them."""

    def __init__(self, documents: list[Document]) -> None:
        self._documents = documents = [each for each in documents if _group(each) in _GROUPS]
        self._pods = pods_of(documents)
        self._names: dict[tuple[str, str], dict[str, Document]] = {}  # by kind and namespace
        for document in documents:
            key = (str(document.value.get("kind")), self._space(document))
            self._names.setdefault(key, {})[str(mapping(document.value, "metadata").get("name"))] = document

    def check(self) -> Found:
        for document in self._documents:
            kind = str(document.value.get("kind"))
            yield from self._check_selector(document, kind)
            if kind == "Service":
                yield from self._check_service(document)
            elif kind == "Ingress" or kind in _ROUTES:
                yield from self._check_routes(document)
            elif kind == "PodMonitor":
                yield from self._check_monitor(document)
            elif kind == "StatefulSet":
                name = at(document.value, "spec", "serviceName")
                yield from self._check_name(document, ("spec", "serviceName"), "Service", name)
            elif kind == "HorizontalPodAutoscaler":
                target = mapping(document.value, "spec", "scaleTargetRef")
                place: Location = ("spec", "scaleTargetRef", "name")
                yield from self._check_name(document, place, str(target.get("kind")), target.get("name"))
            if is_ray(document.value):
                groups = [pods for pods in self._pods if pods.document is document]
                yield from check_ray_network(self._near(document), groups)
                yield from self._check_urls(document, groups)
                yield from self._check_cleanup(document, groups[0])
                cluster, where = cluster_of(document.value)
                place = (*where, "autoscalerOptions", "resources")
                for problem in check_resources(mapping(cluster, "autoscalerOptions", "resources"), place):
                    yield document, problem
        for pods in self._pods:
            for problem in check_pods(pods):
                yield pods.document, problem
            for where, kind, name in _named_by(pods):
                yield from self._check_name(pods.document, where, kind, name)

    def _space(self, document: Document) -> str:
        is_global = str(document.value.get("kind")) in _WITHOUT_NAMESPACE
        return "" if is_global else namespace_of(document)

    def _near(self, document: Document) -> list[Document]:
        return [other for other in self._documents if namespace_of(other) == namespace_of(document)]

    def _chosen(self, document: Document) -> list[Pods]:
        kind = str(document.value.get("kind"))
        selector = mapping(document.value, *_SELECTORS[kind])
        selector = {"matchLabels": selector} if kind == "Service" else selector
        near = [pods for pods in self._pods if pods.namespace == namespace_of(document)]
        return [pods for pods in near if selects(selector, pods.labels)]

    def _check_selector(self, document: Document, kind: str) -> Found:
        if kind not in _SELECTORS:
            return
        where = _SELECTORS[kind]
        is_near = any(pods.namespace == namespace_of(document) for pods in self._pods)
        if mapping(document.value, *where) and is_near and not self._chosen(document):
            yield document, Problem("selects-nothing", where, "no pod of the set has these labels")

    def _check_service(self, document: Document) -> Found:
        chosen = self._chosen(document) if mapping(document.value, "spec", "selector") else []
        named = {name for pods in chosen for name in pods.ports().values()}
        numbers = {number for pods in chosen for number in pods.ports()}
        for index, port in items(document.value, "spec", "ports"):
            target = port.get("targetPort", port.get("port"))
            where = ("spec", "ports", index, "targetPort" if "targetPort" in port else "port")
            if isinstance(target, str) and chosen and target not in named:
                what = f"no pod that the service selects has a port named {target!r}"
                yield document, Problem("service-target", where, what)
            elif whole(target) is not None and numbers and target not in numbers:
                yield document, Problem("service-port", where, f"no pod that the service selects names port {target}")

    def _check_routes(self, document: Document) -> Found:
        for where, name, port in _backends(document.value):
            service = self._names.get(("Service", namespace_of(document)), {}).get(str(name))
            if service is None:
                yield from self._check_name(document, where, "Service", name)
            elif port is not None:
                ports = items(service.value, "spec", "ports")
                given = {scalar(each.get(key)) for _, each in ports for key in ("port", "name")}
                if scalar(port) not in given:
                    shown = ", ".join(sorted(str(each) for each in given - {None}))
                    yield document, Problem("backend-port", where, f"{service.name} has no port {port}; it has {shown}")
        for index, parent in items(document.value, "spec", "parentRefs"):
            where = ("spec", "parentRefs", index)
            if parent.get("kind", "Gateway") != "Gateway" or parent.get("namespace"):
                continue
            yield from self._check_name(document, (*where, "name"), "Gateway", parent.get("name"))
            gateway = self._names.get(("Gateway", namespace_of(document)), {}).get(str(parent.get("name")))
            section = parent.get("sectionName")
            if gateway is not None and section is not None:
                names = [str(listener.get("name")) for _, listener in items(gateway.value, "spec", "listeners")]
                if section not in names:
                    what = f"{gateway.name} has no listener {section!r}; it has {', '.join(names)}"
                    yield document, Problem("backend-port", (*where, "sectionName"), what)
            if gateway is not None:
                yield from self._check_hosts(document, gateway, section)

    def _check_hosts(self, document: Document, gateway: Document, section: Any) -> Found:
        listeners = [
            each for _, each in items(gateway.value, "spec", "listeners") if section in (None, each.get("name"))
        ]
        hosts = [str(each["hostname"]) for each in listeners if each.get("hostname")]
        given = [str(host) for host in listed(document.value, "spec", "hostnames")]
        if given and hosts and len(hosts) == len(listeners) and not any(_meet(a, b) for a in given for b in hosts):
            what = f"{', '.join(given)}; the listeners of {gateway.name} have {', '.join(hosts)}"
            yield document, Problem("backend-port", ("spec", "hostnames"), what)

    def _check_monitor(self, document: Document) -> Found:
        names = {name for pods in self._chosen(document) for name in pods.ports().values()}
        for index, endpoint in items(document.value, "spec", "podMetricsEndpoints"):
            if names and endpoint.get("port") is not None and scalar(endpoint["port"]) not in names:
                what = f"no pod that it selects has a port named {endpoint['port']!r}"
                yield document, Problem("service-target", ("spec", "podMetricsEndpoints", index, "port"), what)

    def _check_urls(self, document: Document, groups: list[Pods]) -> Found:
        """Redis of Ray's own state, which only the head asks, and that of the shared cache, which all do."""
        for where, url, sources in _urls(document.value, groups):
            try:
                parts = urlsplit(url if "//" in url else f"//{url}")
                port = parts.port
            except ValueError:
                continue  # another check says so
            name, _, space = (parts.hostname or "").partition(".")
            space = space.split(".")[0] or namespace_of(document)
            service = self._names.get(("Service", space), {}).get(name)
            if service is None or port is None:
                if "." not in str(parts.hostname):
                    yield from self._check_name(document, where, "Service", name)
                continue
            ports = {scalar(each.get("port")): each for _, each in items(service.value, "spec", "ports")}
            if port not in ports:
                shown = ", ".join(map(str, ports))
                yield (
                    document,
                    Problem("backend-port", where, f"{service.name} has no port {port}; it has {shown}"),
                )
                continue
            secret = at(cluster_of(document.value)[0], "gcsFaultToleranceOptions", "redisPassword", *_SECRET)
            for pods in self._chosen(service):
                mounted = {str(at(volume, "secret", "secretName")) for _, volume in items(pods.spec, "volumes")} - {
                    "None"
                }
                if where[-1] == "redisAddress" and isinstance(secret, str) and mounted and secret not in mounted:
                    what = f"the password is from Secret {secret!r}; {pods.name} has {', '.join(sorted(mounted))}"
                    yield document, Problem("reference-missing", (*where[:-1], "redisPassword"), what)
                if (number := pods.number_of(ports[port].get("targetPort", port))) is not None:
                    for source in sources:
                        yield from check_flow(self._documents, source, pods, number)

    def _check_cleanup(self, document: Document, head: Pods) -> Found:
        """Ray's state in Redis is deleted by a job that KubeRay makes of the head's template; until it has run, a
        finalizer keeps the cluster. What the job needs must not go with the set."""
        cluster, where = cluster_of(document.value)
        if not isinstance(cluster.get("gcsFaultToleranceOptions"), dict):
            return
        name = str(head.spec.get("priorityClassName"))
        if name in self._names.get(("PriorityClass", ""), {}):
            what = f"PriorityClass {name} is of the same set, and gone before the cleanup job is made"
            yield document, Problem("ray-cleanup", (*head.where, "spec", "priorityClassName"), what)
        if namespace_of(document) in self._names.get(("Namespace", ""), {}):
            what = f"Namespace {namespace_of(document)} is of the same set: no job can be made while it is deleted"
            yield document, Problem("ray-namespace", (*where, "gcsFaultToleranceOptions"), what)

    def _check_name(self, document: Document, where: Location, kind: str, name: Any) -> Found:
        """A name that objects of the set do not have, although others of its kind are of the set."""
        space = "" if kind in _WITHOUT_NAMESPACE else namespace_of(document)
        known = self._names.get((kind, space), {})
        if not isinstance(name, str) or name in known or not known or _is_made_by_others(kind, name, self._names):
            return
        # A set seldom contains all its Secrets, so only likely typing errors are reported.
        if kind == "Secret" and not get_close_matches(name, known, 1, 0.85):
            return
        what = f"no {kind} of the set is named {name!r}{did_you_mean(name, known)}"
        yield document, Problem("reference-missing", where, what)


def _meet(one: str, other: str) -> bool:
    """Whether two host names, of which either may begin with *., have one in common."""
    wide, narrow = (one, other) if one.startswith("*.") else (other, one)
    return one == other or (wide.startswith("*.") and narrow.endswith(wide[1:]))


def _group(document: Document) -> str:
    group, slash, _ = str(document.value.get("apiVersion")).partition("/")
    return group if slash else ""


def _is_made_by_others(kind: str, name: str, names: dict[tuple[str, str], dict[str, Document]]) -> bool:
    if kind == "Service":
        rays = [ray for (of, _), found in names.items() if of in ("RayService", "RayCluster") for ray in found]
        return any(name in (f"{ray}-head-svc", f"{ray}-serve-svc") for ray in rays)
    return name.startswith("system-") if kind == "PriorityClass" else name == "default" and kind == "ServiceAccount"


def _named_by(pods: Pods) -> Iterator[tuple[Location, str, Any]]:
    """The objects that a pod needs: place, kind, name."""
    base = (*pods.where, "spec")
    for field, kind in (("serviceAccountName", "ServiceAccount"), ("priorityClassName", "PriorityClass")):
        yield (*base, field), kind, pods.spec.get(field)
    for index, secret in items(pods.spec, "imagePullSecrets"):
        yield (*base, "imagePullSecrets", index, "name"), "Secret", secret.get("name")
    for index, volume in items(pods.spec, "volumes"):
        for source, field, kind in (
            ("configMap", "name", "ConfigMap"),
            ("secret", "secretName", "Secret"),
            ("persistentVolumeClaim", "claimName", "PersistentVolumeClaim"),
        ):
            if not at(volume, source, "optional"):
                yield (*base, "volumes", index, source, field), kind, at(volume, source, field)
    for where, container in pods.containers():
        sources: list[tuple[Location, dict[str, Any]]] = [
            (("env", index, "valueFrom"), mapping(variable, "valueFrom")) for index, variable in items(container, "env")
        ]
        sources += [(("envFrom", index), source) for index, source in items(container, "envFrom")]
        for place, holder in sources:
            for key, given in holder.items():
                if key.startswith(("secret", "configMap")) and not at(given, "optional"):
                    kind = "Secret" if key.startswith("secret") else "ConfigMap"
                    yield (*where, *place, key, "name"), kind, at(given, "name")


def _backends(manifest: dict[str, Any]) -> Iterator[tuple[Location, Any, Any]]:
    """Place, name and port of the services that a route or an Ingress leads to."""
    for index, rule in items(manifest, "spec", "rules"):
        for number, backend in items(rule, "backendRefs"):
            if backend.get("kind", "Service") == "Service" and not backend.get("namespace"):
                yield ("spec", "rules", index, "backendRefs", number), backend.get("name"), backend.get("port")
        for number, path in items(rule, "http", "paths"):
            service = mapping(path, "backend", "service")
            port = mapping(service, "port")
            where = ("spec", "rules", index, "http", "paths", number, "backend", "service")
            yield where, service.get("name"), port.get("name", port.get("number"))


def _urls(manifest: dict[str, Any], groups: list[Pods]) -> Iterator[tuple[Location, str, list[Pods]]]:
    cluster, where = cluster_of(manifest)
    address = at(cluster, "gcsFaultToleranceOptions", "redisAddress")
    if isinstance(address, str):
        yield (*where, "gcsFaultToleranceOptions", "redisAddress"), address, groups[:1]
    text = at(manifest, "spec", "serveConfigV2")
    for document in read_documents("", text)[0] if isinstance(text, str) else []:
        for _, application in items(document.value, "applications"):
            url = at(application, "args", "cache", "url")
            if isinstance(url, str):
                yield ("spec", "serveConfigV2"), url, groups[1:]


def check_doubles(documents: list[Document]) -> Found:
    seen: dict[tuple[str, ...], Document] = {}
    for document in documents:
        name = mapping(document.value, "metadata").get("name")
        key = (_group(document), str(document.value.get("kind")), namespace_of(document), str(name))
        if name and key in seen:
            what = f"{document.name} is defined twice; first on line {seen[key].line(())} of {seen[key].file}"
            rule = "object-twice" if seen[key].file == document.file else "object-in-files"
            yield document, Problem(rule, ("metadata", "name"), what)
        seen.setdefault(key, document)
