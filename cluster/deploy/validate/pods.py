"""Pod templates, of workloads and of Ray groups: what an API server says of a Pod, and it reads none of it inside a Ray
group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.labels import check_metadata, check_selector
from cluster.deploy.validate.naming import (
    is_environment_name,
    is_label,
    is_label_value,
    is_port,
    is_port_name,
    is_qualified_name,
)
from cluster.deploy.validate.resources import check_resources
from cluster.deploy.validate.tree import items, listed, mapping, whole
from cluster.deploy.validate.volumes import check_mounts, check_volumes

_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")
_LIFECYCLE_HANDLERS = ("exec", "httpGet", "tcpSocket", "sleep")
_VALUE_SOURCES = ("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def check_template(
    template: object, where: Location, restart: tuple[str, ...], claims: Iterable[str]
) -> Iterator[Problem]:
    """A pod template. `restart`: the restart policies that its owner allows; `claims`: volumes that come from claim
    templates."""
    yield from check_metadata(mapping(template, "metadata"), (*where, "metadata"))
    yield from check_pod(mapping(template, "spec"), (*where, "spec"), restart, claims)


def check_pod(
    spec: dict[str, Any], where: Location, restart: tuple[str, ...], claims: Iterable[str]
) -> Iterator[Problem]:
    volumes = {str(volume.get("name")) for _, volume in items(spec, "volumes")} | set(claims)
    pod_context = mapping(spec, "securityContext")
    grace = whole(spec.get("terminationGracePeriodSeconds"))
    names: dict[str, Location] = {}
    containers = [
        ((*where, group, index), container)
        for group in ("initContainers", "containers")
        for index, container in items(spec, group)
    ]
    if not items(spec, "containers") and spec:
        yield Problem("pod-containers", (*where, "containers"), "there is no container")
    for place, container in containers:
        name = container.get("name")
        if isinstance(name, str):
            if not is_label(name):
                yield Problem("container-name", (*place, "name"), f"{name!r} is not a DNS label")
            if name in names:
                yield Problem("container-name-unique", (*place, "name"), f"{name!r} names two containers of the pod")
            names.setdefault(name, place)
        yield from _container(container, place, volumes, pod_context, grace=30 if grace is None else grace)
    yield from check_volumes(spec, where)
    yield from one_of(spec, "restartPolicy", restart, where, rule="pod-restart-policy")
    yield from one_of(spec, "dnsPolicy", ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"), where)
    if grace is not None and grace < 0:
        yield Problem("grace-period", (*where, "terminationGracePeriodSeconds"), f"{grace} is below 0")
    for key, value in mapping(spec, "nodeSelector").items():
        if not is_qualified_name(str(key)) or (isinstance(value, str) and not is_label_value(value)):
            yield Problem(
                "label-syntax", (*where, "nodeSelector", str(key)), f"{key}: {value!r} can be no label of a node"
            )
    yield from _tolerations(spec, where)
    yield from _topology(spec, where)
    yield from _affinity(spec, where)


def one_of(
    value: dict[str, Any], key: str, allowed: tuple[str, ...], where: Location, rule: str = "enum"
) -> Iterator[Problem]:
    """A text that must be one of a few."""
    given = value.get(key)
    if isinstance(given, str) and given and given not in allowed:  # "" is as good as not given
        yield Problem(rule, (*where, key), f"{given!r}; it must be {_either(allowed)}")


def _either(allowed: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(allowed[:-1]), allowed[-1])))


def _container(
    container: dict[str, Any], where: Location, volumes: set[str], pod_context: dict[str, Any], grace: int
) -> Iterator[Problem]:
    image = container.get("image")
    if image is None or image == "":
        yield Problem("container-image", (*where, "image"), "there is no image")
    elif isinstance(image, str) and (image != image.strip() or " " in image or "://" in image):
        yield Problem("container-image", (*where, "image"), f"{image!r} is no reference of an image")
    yield from one_of(container, "imagePullPolicy", ("Always", "IfNotPresent", "Never"), where)
    yield from one_of(container, "terminationMessagePolicy", ("File", "FallbackToLogsOnError"), where)
    port_names = set[str]()
    for index, port in items(container, "ports"):
        yield from _port(port, (*where, "ports", index), port_names)
    yield from _environment(container, where)
    yield from check_resources(mapping(container, "resources"), (*where, "resources"))
    yield from check_mounts(container, where, volumes)
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if isinstance(container.get(name), dict):
            yield from _probe(container[name], name, (*where, name), port_names)
    for name in ("postStart", "preStop"):
        handler = mapping(container, "lifecycle", name)
        if handler:
            yield from _handlers(handler, _LIFECYCLE_HANDLERS, (*where, "lifecycle", name), port_names)
        seconds = whole(mapping(handler, "sleep").get("seconds"))
        if seconds is not None and not 0 <= seconds <= grace:
            what = f"sleeps {seconds} s; the pod has {grace} s to end in"
            yield Problem("grace-period", (*where, "lifecycle", name, "sleep", "seconds"), what)
    yield from _security(mapping(container, "securityContext"), (*where, "securityContext"), pod_context)


def _port(port: dict[str, Any], where: Location, names: set[str]) -> Iterator[Problem]:
    for key in ("containerPort", "hostPort"):
        number = whole(port.get(key))
        if number is not None and not is_port(number):
            yield Problem("port-range", (*where, key), f"{number} is not from 1 to 65535")
    yield from one_of(port, "protocol", ("TCP", "UDP", "SCTP"), where)
    name = port.get("name")
    if isinstance(name, str):
        if not is_port_name(name):
            yield Problem("port-name", (*where, "name"), f"{name!r} is not a port name")
        if name in names:
            yield Problem("port-name-unique", (*where, "name"), f"{name!r} names two ports of the container")
        names.add(name)


def _environment(container: dict[str, Any], where: Location) -> Iterator[Problem]:
    seen = set[str]()
    for index, variable in items(container, "env"):
        place = (*where, "env", index)
        name = variable.get("name")
        if isinstance(name, str):
            if not is_environment_name(name):
                yield Problem("env-name", (*place, "name"), f"{name!r} is no name of a variable")
            if name in seen:
                yield Problem("env-unique", (*place, "name"), f"{name!r} is set twice; the last one counts")
            seen.add(name)
        source = variable.get("valueFrom")
        if isinstance(source, dict):
            if variable.get("value"):
                yield Problem("env-source", place, f"{name!r} has a value and a valueFrom")
            given = [key for key in _VALUE_SOURCES if source.get(key) is not None]
            if len(given) != 1:
                yield Problem("env-source", (*place, "valueFrom"), f"{len(given)} sources; there must be one")


def _probe(probe: dict[str, Any], name: str, where: Location, port_names: set[str]) -> Iterator[Problem]:
    yield from _handlers(probe, _HANDLERS, where, port_names)
    for key, least in (
        ("periodSeconds", 1),
        ("timeoutSeconds", 1),
        ("failureThreshold", 1),
        ("successThreshold", 1),
        ("initialDelaySeconds", 0),
    ):
        number = whole(probe.get(key))
        # 0 is as good as not given, and a default then takes its place.
        if number is not None and number < least and number != 0:
            yield Problem("probe-times", (*where, key), f"{number} is below {least}")
    successes = whole(probe.get("successThreshold"))
    if name != "readinessProbe" and successes is not None and successes > 1:
        yield Problem("probe-times", (*where, "successThreshold"), f"{successes}; of a {name} it must be 1")


def _handlers(
    owner: dict[str, Any], allowed: tuple[str, ...], where: Location, port_names: set[str]
) -> Iterator[Problem]:
    given = [key for key in allowed if owner.get(key) is not None]
    if len(given) != 1:
        shown = " and ".join(given) if given else "none"
        yield Problem("probe-handler", where, f"{shown} given; there must be one of {_either(allowed)}")
    for key in given:
        port = mapping(owner, key).get("port")
        number = whole(port)
        if number is not None and not is_port(number):
            yield Problem("port-range", (*where, key, "port"), f"{number} is not from 1 to 65535")
        elif isinstance(port, str) and port not in port_names:
            yield Problem("probe-port", (*where, key, "port"), f"the container has no port named {port!r}")


def _security(context: dict[str, Any], where: Location, pod: dict[str, Any]) -> Iterator[Problem]:
    user = context.get("runAsUser", pod.get("runAsUser"))
    if context.get("runAsNonRoot", pod.get("runAsNonRoot")) is True and user == 0 and not isinstance(user, bool):
        yield Problem("security-context", where, "runAsNonRoot with runAsUser 0")
    if context.get("allowPrivilegeEscalation") is False and context.get("privileged") is True:
        yield Problem("security-context", where, "privileged without allowPrivilegeEscalation")


def _tolerations(spec: dict[str, Any], where: Location) -> Iterator[Problem]:
    for index, toleration in items(spec, "tolerations"):
        place = (*where, "tolerations", index)
        yield from one_of(toleration, "operator", ("Equal", "Exists"), place)
        yield from one_of(toleration, "effect", _EFFECTS, place)
        if toleration.get("operator") == "Exists" and toleration.get("value"):
            yield Problem("toleration", (*place, "value"), "operator Exists has no value")
        if not toleration.get("key") and toleration.get("operator") != "Exists":
            yield Problem("toleration", place, "no key, which only operator Exists may have")
        if toleration.get("tolerationSeconds") is not None and toleration.get("effect") != "NoExecute":
            yield Problem("toleration", (*place, "tolerationSeconds"), "only effect NoExecute has seconds")


def _topology(spec: dict[str, Any], where: Location) -> Iterator[Problem]:
    for index, constraint in items(spec, "topologySpreadConstraints"):
        place = (*where, "topologySpreadConstraints", index)
        yield from one_of(constraint, "whenUnsatisfiable", ("DoNotSchedule", "ScheduleAnyway"), place)
        skew = whole(constraint.get("maxSkew"))
        if skew is not None and skew < 1:
            yield Problem("topology", (*place, "maxSkew"), f"{skew} is below 1")
        if constraint.get("topologyKey") == "":
            yield Problem("topology", (*place, "topologyKey"), "it is empty")
        yield from check_selector(constraint.get("labelSelector"), (*place, "labelSelector"))


def _affinity(spec: dict[str, Any], where: Location) -> Iterator[Problem]:
    affinity = mapping(spec, "affinity")
    for kind in ("podAffinity", "podAntiAffinity"):
        for rule in (
            "requiredDuringSchedulingIgnoredDuringExecution",
            "preferredDuringSchedulingIgnoredDuringExecution",
        ):
            for index, term in items(affinity, kind, rule):
                place: Location = (*where, "affinity", kind, rule, index)
                yield from _weight(term, place, rule)
                if rule.startswith("preferred"):
                    term, place = mapping(term, "podAffinityTerm"), (*place, "podAffinityTerm")
                if not term.get("topologyKey"):
                    yield Problem("topology", (*place, "topologyKey"), "there is none")
                yield from check_selector(term.get("labelSelector"), (*place, "labelSelector"))
    rule = "requiredDuringSchedulingIgnoredDuringExecution"
    for index, term in items(affinity, "nodeAffinity", rule, "nodeSelectorTerms"):
        yield from _node_term(term, (*where, "affinity", "nodeAffinity", rule, "nodeSelectorTerms", index))
    rule = "preferredDuringSchedulingIgnoredDuringExecution"
    for index, term in items(affinity, "nodeAffinity", rule):
        place = (*where, "affinity", "nodeAffinity", rule, index)
        yield from _weight(term, place, rule)
        yield from _node_term(mapping(term, "preference"), (*place, "preference"))


def _weight(term: dict[str, Any], where: Location, rule: str) -> Iterator[Problem]:
    weight = whole(term.get("weight"))
    if rule.startswith("preferred") and weight is not None and not 1 <= weight <= 100:
        yield Problem("topology", (*where, "weight"), f"{weight} is not from 1 to 100")


def _node_term(term: dict[str, Any], where: Location) -> Iterator[Problem]:
    for index, expression in items(term, "matchExpressions"):
        place = (*where, "matchExpressions", index)
        operators = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
        yield from one_of(expression, "operator", operators, place)
        values = listed(expression, "values")
        operator = expression.get("operator")
        if operator in ("In", "NotIn") and not values:
            yield Problem("selector-syntax", (*place, "values"), f"operator {operator} needs values")
        if operator in ("Exists", "DoesNotExist") and values:
            yield Problem("selector-syntax", (*place, "values"), f"operator {operator} takes no values")
        if operator in ("Gt", "Lt") and len(values) != 1:
            yield Problem("selector-syntax", (*place, "values"), f"operator {operator} needs one value")
