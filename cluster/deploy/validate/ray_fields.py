"""The fields of KubeRay's kinds, for where no definitions are given: a closed list of those that Paceline knows.

None: anything goes below it, or another check looks there. A tuple: one of these texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.deploy.validate.finding import Location, Problem
from cluster.deploy.validate.shown import shown
from cluster.deploy.validate.suggestion import did_you_mean

Fields = dict[str, Any]

_OBJECT: Fields = {"apiVersion": None, "kind": None, "metadata": None, "status": None}
_SECRET_VALUE: Fields = {"value": None, "valueFrom": None}
_GROUP: Fields = {"rayStartParams": None, "resources": None, "labels": None, "template": None}
_NETWORK_RULES: Fields = {"ingressRules": None, "egressRules": None}
_MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
_CLUSTER: Fields = {
    "rayVersion": None,
    "suspend": None,
    "managedBy": _MANAGERS,
    "enableInTreeAutoscaling": None,
    "headServiceAnnotations": None,
    "upgradeStrategy": {"type": ("Recreate", "None")},
    "autoscalerOptions": {
        "version": ("v1", "v2"),
        "upscalingMode": ("Default", "Aggressive", "Conservative"),
        **dict.fromkeys(
            (
                "idleTimeoutSeconds", "image", "imagePullPolicy", "resources", "securityContext", "env", "envFrom",
                "volumeMounts", "command", "args",
            )
        ),
    },
    "authOptions": {"mode": ("disabled", "token"), "secretName": None, "enableK8sTokenAuth": None},
    "gcsFaultToleranceOptions": {
        "backend": ("redis", "rocksdb"),
        "redisAddress": None,
        "redisUsername": _SECRET_VALUE,
        "redisPassword": _SECRET_VALUE,
        "externalStorageNamespace": None,
        "storage": dict.fromkeys(("size", "storageClassName", "accessModes", "claimName", "deletionPolicy", "subPath")),
    },
    "tlsOptions": None,
    "historyServerOptions": None,
    "networkPolicy": {
        "mode": ("DenyAll", "DenyAllIngress", "DenyAllEgress"),
        "head": _NETWORK_RULES,
        "worker": _NETWORK_RULES,
        "workerGroups": None,
    },
    "headGroupSpec": {**_GROUP, **dict.fromkeys(("headService", "serviceType", "enableIngress", "ingressOptions"))},
    "workerGroupSpecs": {
        **_GROUP,
        **dict.fromkeys(
            (
                "groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "idleTimeoutSeconds", "priority",
                "suspend", "scaleStrategy",
            )
        ),
    },
}  # fmt: skip
_SERVICE: Fields = {
    "serveConfigV2": None,
    "serveService": None,
    "excludeHeadPodFromServeSvc": None,
    "managedBy": _MANAGERS,
    "suspend": None,
    "rayClusterDeletionDelaySeconds": None,
    "serviceUnhealthySecondThreshold": None,
    "deploymentUnhealthySecondThreshold": None,
    "upgradeStrategy": {
        "type": None,
        "clusterUpgradeOptions": dict.fromkeys(
            ("maxSurgePercent", "stepSizePercent", "intervalSeconds", "gatewayClassName")
        ),
    },
    "rayClusterConfig": _CLUSTER,
}
_JOB: Fields = {
    **dict.fromkeys(
        (
            "entrypoint", "entrypointNumCpus", "entrypointNumGpus", "entrypointResources", "runtimeEnvYAML", "jobId",
            "metadata", "clusterSelector", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "submissionMode",
            "submitterPodTemplate", "submitterConfig", "suspend", "backoffLimit", "activeDeadlineSeconds",
            "preRunningDeadlineSeconds", "deletionStrategy",
        )
    ),
    "managedBy": _MANAGERS,
    "rayClusterSpec": _CLUSTER,
}  # fmt: skip
_CRON_JOB: Fields = {"schedule": None, "timeZone": None, "suspend": None, "jobTemplate": _JOB}
_KINDS: dict[str, tuple[Fields, tuple[str, ...]]] = {  # and what must be given
    "RayCluster": (_CLUSTER, ("headGroupSpec",)),
    "RayService": (_SERVICE, ("rayClusterConfig",)),
    "RayJob": (_JOB, ()),
    "RayCronJob": (_CRON_JOB, ("schedule", "jobTemplate")),
}
_WHOLE = ("replicas", "minReplicas", "maxReplicas", "numOfHosts", "idleTimeoutSeconds", "priority")
_TRUTHS = ("enableInTreeAutoscaling", "suspend", "excludeHeadPodFromServeSvc", "shutdownAfterJobFinishes")


def check_ray_fields(manifest: dict[str, Any]) -> Iterator[Problem]:
    fields, required = _KINDS.get(str(manifest.get("kind")), (None, ()))
    if fields is None:
        return
    yield from _check(manifest, {**_OBJECT, "spec": fields}, ())
    spec = manifest.get("spec")
    for name in required:
        if not isinstance(spec, dict) or spec.get(name) is None:
            yield Problem("schema-missing", ("spec", name), f"{name} must be given")


def _check(value: object, fields: Fields, where: Location) -> Iterator[Problem]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _check(item, fields, (*where, index))
        return
    if value is None:
        return
    if not isinstance(value, dict):
        yield Problem("schema-type", where, f"it is a {type(value).__name__}; it must have keys")
        return
    for key, child in value.items():
        name = str(key)
        if name not in fields:
            yield Problem("schema-unknown-field", (*where, name), f"unknown field {name!r}{did_you_mean(name, fields)}")
        elif isinstance(fields[name], tuple):
            if child is not None and child not in fields[name]:
                what = f"{shown(child, (*where, name))}; it must be one of {', '.join(fields[name])}"
                yield Problem("schema-value", (*where, name), what)
        elif fields[name] is not None:
            yield from _check(child, fields[name], (*where, name))
        elif name in _WHOLE and child is not None and (isinstance(child, bool) or not isinstance(child, int)):
            yield Problem("schema-type", (*where, name), f"{shown(child, (*where, name))} is no whole number")
        elif name in _TRUTHS and child is not None and not isinstance(child, bool):
            yield Problem("schema-type", (*where, name), f"{shown(child, (*where, name))} is neither true nor false")
        elif name == "rayStartParams" and isinstance(child, dict):
            for parameter, text in child.items():
                if text is not None and not isinstance(text, str):
                    what = f"{shown(text, (*where, name, str(parameter)))} of {parameter} is no text; put it in quotes"
                    yield Problem("schema-type", (*where, name, str(parameter)), what)
