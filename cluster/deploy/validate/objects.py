"""The kinds of Kubernetes itself: what an API server checks beyond the schema."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator

from cluster.deploy.validate import networking, workloads
from cluster.deploy.validate.claims import check_claim
from cluster.deploy.validate.finding import Problem
from cluster.deploy.validate.labels import check_metadata
from cluster.deploy.validate.naming import is_config_key, is_label, is_service_label, is_subdomain
from cluster.deploy.validate.pods import one_of
from cluster.deploy.validate.quantity import parse_quantity
from cluster.deploy.validate.tree import Manifest, items, mapping, strings, whole

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


def _volume_claim(manifest: Manifest) -> Iterator[Problem]:
    yield from check_claim(mapping(manifest, "spec"), ("spec",))


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
    yield from one_of(role, "kind", ("Role", "ClusterRole"), ("roleRef",), rule="role")
    if role.get("kind") == "Role" and manifest.get("kind") == "ClusterRoleBinding":
        yield Problem("role", ("roleRef", "kind"), "a ClusterRoleBinding binds a ClusterRole")
    for index, subject in items(manifest, "subjects"):
        place = ("subjects", index)
        yield from one_of(subject, "kind", ("ServiceAccount", "User", "Group"), place, rule="role")
        if subject.get("kind") == "ServiceAccount":
            if not subject.get("namespace") and manifest.get("kind") == "ClusterRoleBinding":
                yield Problem("role", (*place, "namespace"), "a ServiceAccount needs one")
            if subject.get("apiGroup"):
                yield Problem("role", (*place, "apiGroup"), 'of a ServiceAccount it is ""')


_CHECKS: dict[str, Callable[[Manifest], Iterator[Problem]]] = {
    **workloads.CHECKS,
    **networking.CHECKS,
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
