"""The kinds of Kubernetes itself: what an API server checks beyond the schema."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Callable, Iterator
from typing import Any

from cluster.validate.finding import Location, Problem
from cluster.validate.labels import check_metadata, check_selector, selects
from cluster.validate.naming import is_config_key, is_label, is_port, is_port_name, is_service_label, is_subdomain
from cluster.validate.pods import check_pod, check_template, one_of
from cluster.validate.quantity import parse_quantity
from cluster.validate.tree import items, listed, mapping, strings, whole

Manifest = dict[str, Any]

_ALWAYS = ("Always",)
_JOB = ("OnFailure", "Never")
_ANY = ("Always", "OnFailure", "Never")
_WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")
_PERCENT = re.compile(r"(100|[1-9]?\d)%")
_BUILTIN_GROUPS = ("", "apps", "autoscaling", "batch", "extensions", "policy")  # and those in k8s.io
_FILES_OF_TOOLS = ("audit.k8s.io", ".config.k8s.io", "kubeadm.k8s.io")
_RBAC = ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")


def check_object(manifest: Manifest) -> Iterator[Problem]:
    """What concerns one object of any kind, and what its kind asks for."""
    kind = str(manifest.get("kind"))
    version = str(manifest.get("apiVersion"))
    group = version.partition("/")[0] if "/" in version else ""
    is_builtin = group in _BUILTIN_GROUPS or (group.endswith(".k8s.io") and not group.endswith(_FILES_OF_TOOLS))
    yield from _check_name(manifest, kind if is_builtin else "", is_builtin or group == "ray.io")
    yield from check_metadata(mapping(manifest, "metadata"), ("metadata",))
    check = _CHECKS.get(kind)
    if check is not None and is_builtin:
        yield from check(manifest)


def _check_name(manifest: Manifest, kind: str, is_known: bool) -> Iterator[Problem]:
    """is_known: else it may be the file of some tool, which borrows apiVersion and kind and has no name."""
    metadata = mapping(manifest, "metadata")
    name = metadata.get("name")
    if name is None and not metadata.get("generateName") and (is_known or "metadata" in manifest):
        yield Problem("object-name", ("metadata", "name"), "the object has no name")
    if isinstance(name, str):
        if kind == "Service":
            valid, syntax = is_service_label(name), "DNS label that starts with a letter (at most 63)"
        elif kind == "Namespace":
            valid, syntax = is_label(name), "DNS label"
        elif kind in _RBAC:
            valid, syntax = name not in ("", ".", "..") and not set("/%") & set(name), "part of a path"
        else:
            valid, syntax = is_subdomain(name), "DNS name: a-z, 0-9, - and ."
        if not valid:
            yield Problem("object-name", ("metadata", "name"), f"{name!r} is not a {syntax}")
    namespace = metadata.get("namespace")
    if isinstance(namespace, str) and namespace and not is_label(namespace):
        yield Problem("object-name", ("metadata", "namespace"), f"{namespace!r} is not a DNS label")


def _workload(manifest: Manifest) -> Iterator[Problem]:
    spec = mapping(manifest, "spec")
    where: Location = ("spec",)
    claims = [str(mapping(claim, "metadata").get("name")) for _, claim in items(spec, "volumeClaimTemplates")]
    yield from check_template(spec.get("template"), (*where, "template"), _ALWAYS, claims)
    selector = spec.get("selector")
    yield from check_selector(selector, (*where, "selector"))
    labels = mapping(spec, "template", "metadata", "labels")
    if isinstance(selector, dict):
        if not selector.get("matchLabels") and not selector.get("matchExpressions"):
            yield Problem("selector-template", (*where, "selector"), "the selector is empty")
        elif not selects(selector, labels):
            yield Problem("selector-template", (*where, "selector"), f"the template's labels are {_shown(labels)}")
    replicas = whole(spec.get("replicas"))
    if replicas is not None and replicas < 0:
        yield Problem("replicas", (*where, "replicas"), f"{replicas} is below 0")
    yield from _strategy(spec, str(manifest.get("kind")))
    for index, claim in items(spec, "volumeClaimTemplates"):
        yield from _claim(mapping(claim, "spec"), (*where, "volumeClaimTemplates", index, "spec"))


def _shown(labels: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in labels.items()) or "none"


def _strategy(spec: Manifest, kind: str) -> Iterator[Problem]:
    key = "strategy" if kind == "Deployment" else "updateStrategy"
    strategy = mapping(spec, key)
    allowed = ("Recreate", "RollingUpdate") if kind == "Deployment" else ("OnDelete", "RollingUpdate")
    yield from one_of(strategy, "type", allowed, ("spec", key))
    rolling = mapping(strategy, "rollingUpdate")
    if rolling and strategy.get("type") in ("Recreate", "OnDelete"):
        yield Problem("strategy", ("spec", key, "rollingUpdate"), f"type {strategy['type']} has no rollingUpdate")
    if kind == "Deployment":
        surge, unavailable = rolling.get("maxSurge"), rolling.get("maxUnavailable")
        if surge in (0, "0%") and unavailable in (0, "0%"):
            yield Problem("strategy", ("spec", key, "rollingUpdate"), "maxSurge and maxUnavailable are both 0")
    if kind == "StatefulSet":
        yield from one_of(spec, "podManagementPolicy", ("OrderedReady", "Parallel"), ("spec",))


def _pod(manifest: Manifest) -> Iterator[Problem]:
    yield from check_pod(mapping(manifest, "spec"), ("spec",), _ANY, ())


def _job(manifest: Manifest) -> Iterator[Problem]:
    yield from _job_spec(mapping(manifest, "spec"), ("spec",))


def _job_spec(spec: Manifest, where: Location) -> Iterator[Problem]:
    yield from check_template(spec.get("template"), (*where, "template"), _JOB, ())
    if "restartPolicy" not in mapping(spec, "template", "spec"):
        place = (*where, "template", "spec", "restartPolicy")
        yield Problem("pod-restart-policy", place, "of a job it must be given: OnFailure or Never")
    for key in ("completions", "parallelism", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        number = whole(spec.get(key))
        if number is not None and number < 0:
            yield Problem("replicas", (*where, key), f"{number} is below 0")


def _cron_job(manifest: Manifest) -> Iterator[Problem]:
    spec = mapping(manifest, "spec")
    schedule = spec.get("schedule")
    if isinstance(schedule, str) and not is_schedule(schedule):
        yield Problem("cron-schedule", ("spec", "schedule"), f"{schedule!r} is no schedule")
    yield from one_of(spec, "concurrencyPolicy", ("Allow", "Forbid", "Replace"), ("spec",))
    yield from _job_spec(mapping(spec, "jobTemplate", "spec"), ("spec", "jobTemplate", "spec"))


_CRON_FIELDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_CRON_PART = re.compile(r"(\*|\?|(\d+|[A-Za-z]{3})(-(\d+|[A-Za-z]{3}))?)(/(\d+))?")


def is_schedule(schedule: str) -> bool:
    """Five fields of cron, or @hourly and its like."""
    if schedule.startswith("@"):
        return schedule.startswith("@every ") or schedule[1:] in (
            "yearly", "annually", "monthly", "weekly", "daily", "midnight", "hourly",
        )  # fmt: skip
    fields = schedule.split()
    if len(fields) != 5:
        return False
    for text, (least, most) in zip(fields, _CRON_FIELDS, strict=True):
        for part in text.split(","):
            match = _CRON_PART.fullmatch(part)
            if match is None:
                return False
            numbers = [int(match[group]) for group in (2, 4) if match[group] and match[group].isdigit()]
            if any(not least <= number <= most for number in numbers) or match[6] == "0":
                return False
    return True


def _service(manifest: Manifest) -> Iterator[Problem]:
    yield from check_service_spec(mapping(manifest, "spec"), ("spec",))


def check_service_spec(spec: Manifest, where: Location) -> Iterator[Problem]:
    """Of a Service, and of the services that a Ray cluster is given."""
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


def _disruption_budget(manifest: Manifest) -> Iterator[Problem]:
    spec = mapping(manifest, "spec")
    given = [key for key in ("minAvailable", "maxUnavailable") if spec.get(key) is not None]
    if len(given) != 1:
        shown = " and ".join(given) or "neither minAvailable nor maxUnavailable"
        yield Problem("pdb-one", ("spec",), f"{shown} given")
    for key in given:
        value = spec[key]
        number = whole(value)
        if (number is not None and number < 0) or (isinstance(value, str) and not _PERCENT.fullmatch(value)):
            yield Problem("pdb-value", ("spec", key), f"{value!r} is neither a number of pods nor 0% to 100%")
    yield from check_selector(spec.get("selector"), ("spec", "selector"))
    yield from one_of(spec, "unhealthyPodEvictionPolicy", ("IfHealthyBudget", "AlwaysAllow"), ("spec",))


_METRIC_FIELDS = {"Utilization": "averageUtilization", "AverageValue": "averageValue", "Value": "value"}
_METRIC_TYPES = ("Resource", "Pods", "Object", "External", "ContainerResource")


def _autoscaler(manifest: Manifest) -> Iterator[Problem]:
    spec = mapping(manifest, "spec")
    least, most = whole(spec.get("minReplicas")), whole(spec.get("maxReplicas"))
    if most is not None and most < 1:
        yield Problem("hpa-range", ("spec", "maxReplicas"), f"{most} is below 1")
    if least is not None and least < 0:
        yield Problem("hpa-range", ("spec", "minReplicas"), f"{least} is below 0")
    if most is not None and most < (1 if least is None else least):
        yield Problem("hpa-range", ("spec", "minReplicas"), f"minReplicas {least} is over maxReplicas {most}")
    for index, metric in items(spec, "metrics"):
        place = ("spec", "metrics", index)
        yield from one_of(metric, "type", _METRIC_TYPES, place)
        kind = metric.get("type")
        key = kind[:1].lower() + kind[1:] if isinstance(kind, str) else ""
        if kind in _METRIC_TYPES and not isinstance(metric.get(key), dict):
            yield Problem("hpa-metric", place, f"type {kind} needs {key}")
        target = mapping(metric, key, "target")
        yield from one_of(target, "type", tuple(_METRIC_FIELDS), (*place, key, "target"))
        field = _METRIC_FIELDS.get(str(target.get("type")))
        if field and target.get(field) is None:
            yield Problem("hpa-metric", (*place, key, "target"), f"type {target['type']} needs {field}")
    for direction in ("scaleUp", "scaleDown"):
        rules = mapping(spec, "behavior", direction)
        yield from one_of(rules, "selectPolicy", ("Max", "Min", "Disabled"), ("spec", "behavior", direction))
        for index, policy in items(rules, "policies"):
            yield from one_of(policy, "type", ("Pods", "Percent"), ("spec", "behavior", direction, "policies", index))


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


def _config_map(manifest: Manifest) -> Iterator[Problem]:
    for field in ("data", "binaryData", "stringData"):
        for key, value in mapping(manifest, field).items():
            if not is_config_key(str(key)):
                yield Problem("config-key", (field, str(key)), f"{key!r} is no key: letters, digits, -, _ and .")
            is_coded = field == "binaryData" or (field == "data" and manifest.get("kind") == "Secret")
            if is_coded and isinstance(value, str) and not _is_base64(value):
                yield Problem("secret-base64", (field, str(key)), "the value is not base64")
    for key in mapping(manifest, "binaryData"):
        if key in mapping(manifest, "data"):
            yield Problem("config-key", ("binaryData", str(key)), f"{key!r} is in data, too")


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


_ACCESS = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")


def _volume_claim(manifest: Manifest) -> Iterator[Problem]:
    yield from _claim(mapping(manifest, "spec"), ("spec",))


def _claim(spec: Manifest, where: Location) -> Iterator[Problem]:
    modes = listed(spec, "accessModes")
    if not modes:
        yield Problem("volume-claim", (*where, "accessModes"), "there is none")
    for index, mode in enumerate(modes):
        if mode not in _ACCESS:
            yield Problem("enum", (*where, "accessModes", index), f"{mode!r}; it must be one of {', '.join(_ACCESS)}")
    yield from one_of(spec, "volumeMode", ("Filesystem", "Block"), where)
    size = mapping(spec, "resources", "requests").get("storage")
    value = parse_quantity(size)
    if size is None:
        yield Problem("volume-claim", (*where, "resources", "requests", "storage"), "there is no size")
    elif value is None or value <= 0:
        yield Problem("quantity", (*where, "resources", "requests", "storage"), f"{size!r} is no size")


def _quota(manifest: Manifest) -> Iterator[Problem]:
    for name, text in mapping(manifest, "spec", "hard").items():
        value = parse_quantity(text)
        if value is None or value < 0:
            yield Problem("quantity", ("spec", "hard", str(name)), f"{text!r} is no quantity")


def _limit_range(manifest: Manifest) -> Iterator[Problem]:
    for index, limit in items(manifest, "spec", "limits"):
        place = ("spec", "limits", index)
        yield from one_of(limit, "type", ("Container", "Pod", "PersistentVolumeClaim"), place)
        for kind in ("min", "max", "default", "defaultRequest"):
            for name, text in mapping(limit, kind).items():
                if parse_quantity(text) is None:
                    yield Problem("quantity", (*place, kind, str(name)), f"{text!r} is no quantity")
        for name, text in mapping(limit, "min").items():
            least, most = parse_quantity(text), parse_quantity(mapping(limit, "max").get(name))
            if least is not None and most is not None and least > most:
                yield Problem("resource-limit", (*place, "min", str(name)), f"min {text} of {name} is over max")


def _priority_class(manifest: Manifest) -> Iterator[Problem]:
    value = whole(manifest.get("value"))
    name = strings(manifest, "metadata").get("name", "")
    if value is not None and value > 1_000_000_000 and not name.startswith("system-"):
        yield Problem("priority-class", ("value",), f"{value} is over 1000000000")
    yield from one_of(manifest, "preemptionPolicy", ("Never", "PreemptLowerPriority"), ())


def _role(manifest: Manifest) -> Iterator[Problem]:
    for index, rule in items(manifest, "rules"):
        if not rule.get("verbs"):
            yield Problem("role", ("rules", index, "verbs"), "there is none")
        if rule.get("apiGroups") is None and rule.get("resources"):
            yield Problem("role", ("rules", index, "apiGroups"), 'there is none; of core kinds it is ""')


def _role_binding(manifest: Manifest) -> Iterator[Problem]:
    role = mapping(manifest, "roleRef")
    yield from one_of(role, "kind", ("Role", "ClusterRole"), ("roleRef",), "role")
    if role.get("kind") == "Role" and manifest.get("kind") == "ClusterRoleBinding":
        yield Problem("role", ("roleRef", "kind"), "a ClusterRoleBinding binds a ClusterRole")
    for index, subject in items(manifest, "subjects"):
        place = ("subjects", index)
        yield from one_of(subject, "kind", ("ServiceAccount", "User", "Group"), place, "role")
        if subject.get("kind") == "ServiceAccount":
            if not subject.get("namespace") and manifest.get("kind") == "ClusterRoleBinding":
                yield Problem("role", (*place, "namespace"), "a ServiceAccount needs one")
            if subject.get("apiGroup"):
                yield Problem("role", (*place, "apiGroup"), 'of a ServiceAccount it is ""')


_CHECKS: dict[str, Callable[[Manifest], Iterator[Problem]]] = {
    **dict.fromkeys(_WORKLOADS, _workload),
    "Pod": _pod,
    "Job": _job,
    "CronJob": _cron_job,
    "Service": _service,
    "PodDisruptionBudget": _disruption_budget,
    "HorizontalPodAutoscaler": _autoscaler,
    "NetworkPolicy": _network_policy,
    "Ingress": _ingress,
    "ConfigMap": _config_map,
    "Secret": _config_map,
    "PersistentVolumeClaim": _volume_claim,
    "ResourceQuota": _quota,
    "LimitRange": _limit_range,
    "PriorityClass": _priority_class,
    "Role": _role,
    "ClusterRole": _role,
    "RoleBinding": _role_binding,
    "ClusterRoleBinding": _role_binding,
}
