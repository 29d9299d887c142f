"""API versions that are gone from Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.deploy.validate.finding import Problem

# (apiVersion, kind): (gone in, what took its place)
_REMOVED = {
    **{("extensions/v1beta1", kind): ("1.16", "apps/v1") for kind in ("Deployment", "DaemonSet", "ReplicaSet")},
    **{
        (f"apps/{version}", kind): ("1.16", "apps/v1")
        for version in ("v1beta1", "v1beta2")
        for kind in ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet")
    },
    ("extensions/v1beta1", "NetworkPolicy"): ("1.16", "networking.k8s.io/v1"),
    ("extensions/v1beta1", "Ingress"): ("1.22", "networking.k8s.io/v1"),
    ("networking.k8s.io/v1beta1", "Ingress"): ("1.22", "networking.k8s.io/v1"),
    ("networking.k8s.io/v1beta1", "IngressClass"): ("1.22", "networking.k8s.io/v1"),
    ("policy/v1beta1", "PodDisruptionBudget"): ("1.25", "policy/v1"),
    ("policy/v1beta1", "PodSecurityPolicy"): ("1.25", "pod security admission"),
    ("batch/v1beta1", "CronJob"): ("1.25", "batch/v1"),
    ("autoscaling/v2beta1", "HorizontalPodAutoscaler"): ("1.25", "autoscaling/v2"),
    ("autoscaling/v2beta2", "HorizontalPodAutoscaler"): ("1.26", "autoscaling/v2"),
    ("discovery.k8s.io/v1beta1", "EndpointSlice"): ("1.25", "discovery.k8s.io/v1"),
    ("scheduling.k8s.io/v1beta1", "PriorityClass"): ("1.22", "scheduling.k8s.io/v1"),
    ("storage.k8s.io/v1beta1", "StorageClass"): ("1.22", "storage.k8s.io/v1"),
    ("apiextensions.k8s.io/v1beta1", "CustomResourceDefinition"): ("1.22", "apiextensions.k8s.io/v1"),
    **{
        ("rbac.authorization.k8s.io/v1beta1", kind): ("1.22", "rbac.authorization.k8s.io/v1")
        for kind in ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    },
    ("batch/v2alpha1", "CronJob"): ("1.21", "batch/v1"),
    ("events.k8s.io/v1beta1", "Event"): ("1.25", "events.k8s.io/v1"),
    ("node.k8s.io/v1beta1", "RuntimeClass"): ("1.25", "node.k8s.io/v1"),
    ("coordination.k8s.io/v1beta1", "Lease"): ("1.22", "coordination.k8s.io/v1"),
    ("certificates.k8s.io/v1beta1", "CertificateSigningRequest"): ("1.22", "certificates.k8s.io/v1"),
    ("apiregistration.k8s.io/v1beta1", "APIService"): ("1.22", "apiregistration.k8s.io/v1"),
    ("storage.k8s.io/v1beta1", "CSIStorageCapacity"): ("1.27", "storage.k8s.io/v1"),
    **{
        ("storage.k8s.io/v1beta1", kind): ("1.22", "storage.k8s.io/v1")
        for kind in ("CSIDriver", "CSINode", "VolumeAttachment")
    },
    **{
        ("admissionregistration.k8s.io/v1beta1", kind): ("1.22", "admissionregistration.k8s.io/v1")
        for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
    },
    **{
        (f"flowcontrol.apiserver.k8s.io/{version}", kind): (release, "flowcontrol.apiserver.k8s.io/v1")
        for version, release in (("v1beta1", "1.26"), ("v1beta2", "1.29"), ("v1beta3", "1.32"))
        for kind in ("FlowSchema", "PriorityLevelConfiguration")
    },
}
_DEPRECATED = {("ray.io/v1alpha1", kind): "ray.io/v1" for kind in ("RayCluster", "RayService", "RayJob")}


def check_api_version(manifest: dict[str, Any]) -> Iterator[Problem]:
    key = (str(manifest.get("apiVersion")), str(manifest.get("kind")))
    if key in _REMOVED:
        release, instead = _REMOVED[key]
        yield Problem("api-removed", ("apiVersion",), f"{key[0]} {key[1]} is gone since {release}; now it is {instead}")
    if key in _DEPRECATED:
        yield Problem("api-deprecated", ("apiVersion",), f"{key[0]} is deprecated; write {_DEPRECATED[key]}")


def is_removed(version: str, kind: str) -> bool:
    return (version, kind) in _REMOVED
