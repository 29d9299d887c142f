"""The RayService: a head without work and one worker group each for routers, targets and draft workers."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from cluster.deploy.pods import Object, container_security, metadata_of, ray_pod
from cluster.deploy.ports import REDIS_PORT
from cluster.deploy.serve_config import serve_config_text
from cluster.deploy.values import DeployValues, PodValues, ScaledValues, number_of

_MARKER = 1  # of a group's own resource on each of its pods; Serve's replicas ask for a small part of it


def ray_service(values: DeployValues) -> Object:
    """What KubeRay turns into a cluster. A change of `serveConfigV2` alone is applied in place."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": metadata_of(values, values.name, "cluster"),
        "spec": {
            "upgradeStrategy": _upgrade(values),
            "excludeHeadPodFromServeSvc": True,
            # Routers of the old cluster may finish their streams.
            "rayClusterDeletionDelaySeconds": values.grace_s,
            "serveConfigV2": serve_config_text(values),
            "rayClusterConfig": _cluster(values),
        },
    }


def worker_groups(values: DeployValues) -> dict[str, ScaledValues]:
    """By name; draft workers only where there is a draft model."""
    groups: dict[str, ScaledValues] = {"router": values.router, "target": values.target}
    return groups if values.model.draft == "none" else groups | {"draft": values.draft}


def _upgrade(values: DeployValues) -> Object:
    upgrade = values.upgrade
    strategy: Object = {"type": upgrade.type}
    if upgrade.type == "NewClusterWithIncrementalUpgrade":
        strategy["clusterUpgradeOptions"] = {
            "gatewayClassName": upgrade.gateway_class,
            "maxSurgePercent": upgrade.max_surge_percent,
            "stepSizePercent": upgrade.step_percent,
            "intervalSeconds": upgrade.interval_s,
        }
    return strategy


def _cluster(values: DeployValues) -> Object:
    cluster: Object = {
        "rayVersion": metadata.version("ray"),
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": values.autoscaling,
    }
    if values.autoscaling:
        cluster["autoscalerOptions"] = {
            "version": "v2",
            "upscalingMode": "Default",
            "idleTimeoutSeconds": values.target.idle_timeout_s,
            "imagePullPolicy": values.image.pull_policy,
            "resources": {
                "requests": {"cpu": "250m", "memory": "512Mi", "ephemeral-storage": "1Gi"},
                "limits": {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "1Gi"},
            },
            "securityContext": container_security(),
        }
    if values.gcs.enabled:
        cluster["gcsFaultToleranceOptions"] = {
            "redisAddress": f"redis://{values.name}-gcs:{REDIS_PORT}",
            "redisPassword": {"valueFrom": {"secretKeyRef": {"name": values.gcs.secret, "key": "password"}}},
        }
    cluster["headGroupSpec"] = {
        "serviceType": "ClusterIP",
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0", **_object_store(values.head)},
        "template": ray_pod(values, "head", values.head),
    }
    cluster["workerGroupSpecs"] = [_group(values, name, group) for name, group in worker_groups(values).items()]
    return cluster


def _object_store(pod: PodValues) -> dict[str, str]:
    """Half of /dev/shm; the rest is for indexes and ranks. Left to itself, Ray takes a third of all memory, and a disk
    where /dev/shm has less."""
    return {"object-store-memory": str(int(number_of(pod.shm)) // 2)}


def _group(values: DeployValues, name: str, group: ScaledValues) -> Object:
    resources = {"CPU": group.ray_cpus, "GPU": group.gpus, name: _MARKER}
    spec: dict[str, Any] = {
        "groupName": name,
        "replicas": group.min,
        "minReplicas": group.min,
        "maxReplicas": group.max,
        "numOfHosts": 1,
        "rayStartParams": _object_store(group),
        "resources": {key: str(amount) for key, amount in resources.items() if amount},
        "template": ray_pod(values, name, group),
    }
    if values.autoscaling:
        spec |= {"idleTimeoutSeconds": group.idle_timeout_s, "priority": group.priority}
    return spec
