"""What admission looks at in a namespace: quotas, limit ranges and Pod Security."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise

from cluster.deploy.validate.documents import Document
from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.pods import Pods, namespace_of, pods_of
from cluster.deploy.validate.quantity import parse_quantity
from cluster.deploy.validate.suggestion import did_you_mean
from cluster.deploy.validate.tree import at, items, mapping

Found = Iterator[tuple[Document, Problem]]

_COMPUTE = ("cpu", "memory", "ephemeral-storage")
_QUOTA_KEYS = (
    *_COMPUTE, *(f"{kind}.{name}" for kind in ("requests", "limits") for name in _COMPUTE), "requests.storage", "pods",
    "services", "services.nodeports", "services.loadbalancers", "replicationcontrollers", "resourcequotas", "secrets",
    "configmaps", "persistentvolumeclaims",
)  # fmt: skip
_SECURITY = re.compile(r"pod-security\.kubernetes\.io/(enforce|audit|warn)(-version)?")
_LEVELS = ("privileged", "baseline", "restricted")


def check_admission(documents: list[Document]) -> Found:
    pods = pods_of(documents)
    for document in documents:
        near = [each for each in pods if each.namespace == namespace_of(document)]
        ranges = [other for other in documents if other.value.get("kind") == "LimitRange"]
        ranges = [other for other in ranges if namespace_of(other) == namespace_of(document)]
        if document.value.get("kind") == "ResourceQuota":
            yield from ((document, problem) for problem in _check_quota(document, near, ranges))
        elif document.value.get("kind") == "LimitRange":
            yield from ((document, problem) for problem in _check_limits(document))
            yield from _check_within(document, near)
        elif document.value.get("kind") == "Namespace":
            yield from ((document, problem) for problem in _check_security(document))


def _check_quota(document: Document, pods: list[Pods], ranges: list[Document]) -> Iterator[Problem]:
    for name, text in mapping(document.value, "spec", "hard").items():
        where: Location = ("spec", "hard", str(name))
        key = str(name)
        kind, _, resource = key.partition(".")
        is_device = "/" in key and kind != "requests" and not key.startswith("count/") and "storageclass" not in key
        if is_device and "hugepages-" not in key:
            device = resource if kind == "limits" else key
            yield Problem("quota-key", where, f"of devices only requests are counted: requests.{device}")
        elif "/" not in key and key not in _QUOTA_KEYS and "hugepages-" not in key:
            yield Problem("quota-key", where, f"{key!r} is not counted{did_you_mean(key, _QUOTA_KEYS)}")
        if (hard := parse_quantity(text)) is None:
            yield Problem("schema-value", where, f"{text!r}: not a quantity such as 500m, 2 or 16Gi")
            continue
        kind, resource = (kind, resource) if resource and kind in ("requests", "limits") else ("requests", key)
        if resource == "pods":
            used = Decimal(sum(each.at_least for each in pods))
        elif resource in _COMPUTE or "/" in resource:
            used = sum((_used(each, kind, resource, ranges) for each in pods), Decimal(0))
        else:
            continue
        if used > hard:
            what = f"the pods of the set need at least {used:f} of {key}; {text} are admitted"
            yield Problem("quota-exceeded", where, what)


def _used(pods: Pods, kind: str, resource: str, ranges: list[Document]) -> Decimal:
    return pods.at_least * sum(
        (_amount(c, kind, resource, ranges) for where, c in pods.containers() if where[-2] == "containers"), Decimal(0)
    )


def _amount(container: dict[str, object], kind: str, resource: str, ranges: list[Document]) -> Decimal:
    order = ("requests", "limits") if kind == "requests" else ("limits",)
    for key in order:
        if (value := parse_quantity(at(container, "resources", key, resource))) is not None:
            return value
    defaults = "defaultRequest" if kind == "requests" else "default"
    given = [at(limit, defaults, resource) for each in ranges for _, limit in items(each.value, "spec", "limits")]
    return next((value for text in given if (value := parse_quantity(text)) is not None), Decimal(0))


def _check_limits(document: Document) -> Iterator[Problem]:
    """min <= defaultRequest <= default <= max."""
    for index, limit in items(document.value, "spec", "limits"):
        order = ("min", "defaultRequest", "default", "max")
        for resource in sorted({name for kind in order for name in mapping(limit, kind)}, key=str):
            given = [(kind, parse_quantity(mapping(limit, kind).get(resource))) for kind in order]
            known = [(kind, value) for kind, value in given if value is not None]
            for (lower, least), (upper, most) in pairwise(known):
                if least > most:
                    what = f"{lower} {limit[lower][resource]} of {resource} is over {upper} {limit[upper][resource]}"
                    yield Problem("limit-range", ("spec", "limits", index, lower, str(resource)), what)


def _check_within(document: Document, pods: list[Pods]) -> Found:
    for _, limit in items(document.value, "spec", "limits"):
        if limit.get("type") != "Container":
            continue
        for each in pods:
            for where, container in each.containers():
                for bound, kind in (("min", "requests"), ("max", "limits")):
                    for resource, text in mapping(limit, bound).items():
                        own = parse_quantity(at(container, "resources", kind, resource))
                        value = parse_quantity(text)
                        if own is not None and value is not None and (own < value if bound == "min" else own > value):
                            what = f"{document.name} has {bound} {text} of {resource}"
                            yield each.document, Problem("limit-range", (*where, "resources", kind, resource), what)


def _check_security(document: Document) -> Iterator[Problem]:
    for key, value in mapping(document.value, "metadata", "labels").items():
        if (match := _SECURITY.fullmatch(str(key))) is None:
            if str(key).startswith("pod-security."):
                what = (
                    f"{key!r}; the keys are pod-security.kubernetes.io/enforce, audit and warn, and each with -version"
                )
                yield Problem("pod-security", ("metadata", "labels", str(key)), what)
        elif match[2] and not re.fullmatch(r"latest|v1\.\d+", str(value)):
            yield Problem("pod-security", ("metadata", "labels", str(key)), f"{value!r}; it must be latest or v1.N")
        elif not match[2] and value not in _LEVELS:
            what = f"{value!r}; it must be one of {', '.join(_LEVELS)}"
            yield Problem("pod-security", ("metadata", "labels", str(key)), what)
