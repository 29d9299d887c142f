"""The two Redis roles, never one instance: Ray's own state, of which nothing may be evicted, and the shared cache that
evicts what was least used. Both run the server that the image brings."""

from __future__ import annotations

from cluster.deploy.pods import (
    Object,
    container_security,
    image,
    labels,
    metadata_of,
    password_volume,
    pod_defaults,
    priority_class,
    selector,
)
from cluster.deploy.ports import REDIS_PORT
from cluster.deploy.serve_config import cache_bytes
from cluster.deploy.values import DeployValues, times

_OVERHEAD = 1.5  # of a server's memory over its data: fragments, buffers, the copy while it rewrites its log


def gcs_redis(values: DeployValues) -> list[Object]:
    """Nothing is evicted, every write is on disk within a second."""
    if not values.gcs.enabled:
        return []
    settings = ["maxmemory-policy noeviction", "appendonly yes", "appendfsync everysec", 'save ""']
    gcs = values.gcs
    return _redis(values, "gcs", settings, secret=gcs.secret, storage=gcs.storage, cpu=gcs.cpu, memory=gcs.memory)


def cache_redis(values: DeployValues) -> list[Object]:
    """Bounded; what expires goes by use when it is full."""
    cache = values.cache
    settings = [f"maxmemory {cache_bytes(values)}", "maxmemory-policy volatile-lfu", 'save ""']
    settings += ["appendonly yes", "appendfsync everysec"] if cache.storage is not None else ["appendonly no"]
    memory = times(cache.memory, _OVERHEAD)
    return _redis(values, "cache", settings, secret=cache.secret, storage=cache.storage, cpu=cache.cpu, memory=memory)


def _redis(
    values: DeployValues,
    role: str,
    settings: list[str],
    secret: str | None,
    storage: str | None,
    cpu: str,
    memory: str,
) -> list[Object]:
    name = f"{values.name}-{role}"
    text = "\n".join(["bind * -::*", f"port {REDIS_PORT}", "dir /data", *settings, "daemonize no"])
    text += "" if secret is not None else "\nprotected-mode no"
    configuration = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata_of(values, name, role),
        "data": {"valkey.conf": text + "\n"},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_of(values, name, role),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "selector": selector(values, role),
            "ports": [{"name": "redis", "port": REDIS_PORT, "targetPort": "redis", "protocol": "TCP"}],
        },
    }
    spec: Object = {
        "serviceName": name,
        "replicas": 1,
        "selector": {"matchLabels": selector(values, role)},
        "template": {
            "metadata": {"labels": labels(values, role)},
            "spec": _pod(values, name, secret=secret, storage=storage, cpu=cpu, memory=memory),
        },
    }
    if storage is not None:
        spec["volumeClaimTemplates"] = [
            {
                "metadata": {"name": "data"},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": storage}}},
            }
        ]
    server = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata_of(values, name, role),
        "spec": spec,
    }
    return [configuration, service, server, _only_for_ray(values, name, role)]


def _pod(values: DeployValues, name: str, secret: str | None, storage: str | None, cpu: str, memory: str) -> Object:
    spec = pod_defaults(values)
    spec["serviceAccountName"] = values.name
    spec["terminationGracePeriodSeconds"] = 60
    if values.scheduling.priority_classes:
        spec["priorityClassName"] = priority_class(values, "redis")
    # The password is in no command line; the server reads its settings from standard input.
    start = "cat /etc/valkey/valkey.conf > /tmp/valkey.conf && exec valkey-server /tmp/valkey.conf"
    if secret is not None:
        start = (
            "umask 077 && { cat /etc/valkey/valkey.conf; "
            'printf \'requirepass "%s"\\n\' "$(cat /etc/paceline/redis/password)"; } > /tmp/valkey.conf '
            "&& exec valkey-server /tmp/valkey.conf"
        )
    ping = (
        f"exec 3<>/dev/tcp/127.0.0.1/{REDIS_PORT} && printf 'PING\\r\\n' >&3 && read -t 3 -r line <&3 "
        "&& [[ $line == +PONG* || $line == -NOAUTH* ]]"
    )
    probe = {"exec": {"command": ["bash", "-c", ping]}, "timeoutSeconds": 5}
    mounts: list[Object] = [
        {"name": "data", "mountPath": "/data"},
        {"name": "scratch", "mountPath": "/tmp"},
        {"name": "configuration", "mountPath": "/etc/valkey", "readOnly": True},
    ]
    volumes: list[Object] = [
        {"name": "scratch", "emptyDir": {"sizeLimit": "16Mi"}},
        {"name": "configuration", "configMap": {"name": name}},
    ]
    if secret is not None:
        mounts.append({"name": "password", "mountPath": "/etc/paceline/redis", "readOnly": True})
        volumes.append(password_volume("password", secret))
    if storage is None:
        volumes.append({"name": "data", "emptyDir": {"sizeLimit": "1Gi"}})
    quantities = {"cpu": cpu, "memory": memory, "ephemeral-storage": "1Gi"}
    spec["containers"] = [
        {
            "name": "valkey",
            "image": image(values),
            "imagePullPolicy": values.image.pull_policy,
            "command": ["bash", "-c", start],
            "ports": [{"name": "redis", "containerPort": REDIS_PORT, "protocol": "TCP"}],
            "resources": {"requests": quantities, "limits": dict(quantities)},
            "securityContext": container_security(),
            "volumeMounts": mounts,
            "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": 60},
            "readinessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 2},
            "livenessProbe": {**probe, "periodSeconds": 20, "failureThreshold": 6},
        }
    ]
    spec["volumes"] = volumes
    return spec


def _only_for_ray(values: DeployValues, name: str, role: str) -> Object:
    """The peers of a policy: the head alone reaches Ray's state; whoever drafts or serves reaches the cache."""
    components = ["head"] if role == "gcs" else ["router", "target", "draft", "head"]
    peer = {
        "podSelector": {
            "matchLabels": {"app.kubernetes.io/instance": values.name},
            "matchExpressions": [
                {"key": "app.kubernetes.io/component", "operator": "In", "values": components},
            ],
        }
    }
    # KubeRay's job that removes the state of a deleted cluster is made of the head's template.
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata_of(values, name, role),
        "spec": {
            "podSelector": {"matchLabels": selector(values, role)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [peer], "ports": [{"port": REDIS_PORT, "protocol": "TCP"}]}],
        },
    }
