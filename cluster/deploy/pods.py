"""What all pods have in common, and the pods of Ray's groups: identity, confinement, volumes, probes."""

from __future__ import annotations

import math
from importlib import metadata
from typing import Any

from actors.workers.ray_environment import OWN_RAY
from cluster.deploy.ports import AGENT_PORT, CLIENT_PORT, DASHBOARD_PORT, GCS_PORT, METRICS_PORT
from cluster.deploy.serve_config import CACHE_PASSWORD_FILE, TENANTS_FILE
from cluster.deploy.values import DeployValues, PodValues, number_of

Object = dict[str, Any]

ENDPOINTS_SETTLE_S = 5  # after a pod is being deleted, until nobody sends it new requests

_MODELS = "/models"


def selector(values: DeployValues, component: str) -> dict[str, str]:
    """The labels that choose the pods of a component. KubeRay leaves these two alone."""
    return {"app.kubernetes.io/instance": values.name, "app.kubernetes.io/component": component}


def labels(values: DeployValues, component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "paceline", **selector(values, component)}


def metadata_of(values: DeployValues, name: str, component: str, **more: Any) -> Object:
    return {"name": name, "namespace": values.namespace, "labels": labels(values, component), **more}


def image(values: DeployValues) -> str:
    given = values.image
    if given.digest is not None:
        return f"{given.repository}@{given.digest}"
    return f"{given.repository}:{given.tag or metadata.version('paceline')}"


def pod_security(values: DeployValues) -> Object:
    user = values.security.user
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Object:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def pod_defaults(values: DeployValues) -> Object:
    """What every pod's specification has."""
    spec: Object = {
        "securityContext": pod_security(values),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }
    if values.image.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in values.image.pull_secrets]
    if values.security.sandbox is not None:
        spec["runtimeClassName"] = values.security.sandbox
    return spec


def ray_pod(values: DeployValues, component: str, pod: PodValues) -> Object:
    """The template of a group. KubeRay finds Ray in the first container, and adds what starts it."""
    spec = pod_defaults(values)
    spec["restartPolicy"] = "Never"  # the autoscaler v2 wants it so; KubeRay makes a new pod
    container: Object = {
        "name": f"ray-{'head' if component == 'head' else 'worker'}",
        "image": image(values),
        "imagePullPolicy": values.image.pull_policy,
        "ports": _ports(values, component),
        "env": _environment(values),
        "resources": _resources(pod),
        "securityContext": container_security(),
        "volumeMounts": _mounts(values),
        **_probes(values, component),
    }
    if component == "head":
        # The autoscaler beside Ray asks Kubernetes for pods. KubeRay makes the account and its rights.
        spec["automountServiceAccountToken"] = values.autoscaling
    else:
        spec["serviceAccountName"] = values.name
    if component == "router":
        container["lifecycle"] = {"preStop": {"exec": {"command": _drain(values)}}}
    spec["terminationGracePeriodSeconds"] = values.grace_s if component == "router" else 60
    spec["containers"] = [container]
    if values.model.prepare and component != "head":
        spec["initContainers"] = _preparation(values, component)
    spec["volumes"] = _volumes(values, pod)
    if pod.node_selector:
        spec["nodeSelector"] = pod.node_selector
    if pod.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if values.scheduling.priority_classes:
        spec["priorityClassName"] = priority_class(values, component)
    if values.scheduling.spread and component in ("router", "target"):
        spec["topologySpreadConstraints"] = [_spread(values, component)]
    return {"metadata": {"labels": labels(values, component)}, "spec": spec}


def priority_class(values: DeployValues, component: str) -> str:
    return f"{values.name}-draft" if component == "draft" else f"{values.name}-serving"


def _ports(values: DeployValues, component: str) -> list[Object]:
    ports = {"metrics": METRICS_PORT}
    if component == "head":
        ports |= {"gcs": GCS_PORT, "dashboard": DASHBOARD_PORT, "client": CLIENT_PORT}
        # KubeRay's own service of a RayService is made of the head's ports with such names; without one it makes none,
        # and the RayService never becomes ready.
        ports |= {"serve": values.gateway.http_port, "serve-grpc": values.gateway.grpc_port}
    else:
        ports |= {"http": values.gateway.http_port, "grpc": values.gateway.grpc_port}
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def _environment(values: DeployValues) -> list[Object]:
    """Whatever writes a file writes it below /tmp: the root file system is read-only. Ray's processes, replicas among
    them, write no files of their output: it is the container's, for `kubectl logs` and whoever collects logs."""
    home = _MODELS if values.model.prepare else "/tmp/paceline"
    variables = {
        **OWN_RAY,
        "RAY_LOG_TO_STDERR": "1",
        "HOME": "/tmp/home",
        "XDG_CACHE_HOME": "/tmp/cache",
        "NUMBA_CACHE_DIR": "/tmp/cache/numba",
        "TRITON_CACHE_DIR": "/tmp/cache/triton",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/cache/inductor",
        "FLASHINFER_WORKSPACE_BASE": "/tmp/cache",
        "HF_HOME": "/tmp/cache/huggingface",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PACELINE_HOME": home,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return [{"name": name, "value": value} for name, value in variables.items()]


def _resources(pod: PodValues) -> Object:
    """Memory is promised in full; CPUs beyond the request are lent."""
    requests: Object = {"cpu": pod.cpu, "memory": pod.memory, "ephemeral-storage": pod.scratch}
    limits: Object = {"cpu": str(max(1, math.ceil(2 * number_of(pod.cpu)))), "memory": pod.memory}
    limits["ephemeral-storage"] = pod.scratch
    if pod.gpus:
        requests["nvidia.com/gpu"] = limits["nvidia.com/gpu"] = str(pod.gpus)
    return {"requests": requests, "limits": limits}


def _mounts(values: DeployValues) -> list[Object]:
    mounts: list[Object] = [
        {"name": "scratch", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "models", "mountPath": _MODELS, "readOnly": not values.model.prepare},
    ]
    if values.tenants.secret is not None:
        mounts.append({"name": "tenants", "mountPath": _folder(TENANTS_FILE), "readOnly": True})
    if values.cache.secret is not None:
        mounts.append({"name": "cache-password", "mountPath": _folder(CACHE_PASSWORD_FILE), "readOnly": True})
    return mounts


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _volumes(values: DeployValues, pod: PodValues) -> list[Object]:
    claim = {"claimName": values.model.claim} | ({} if values.model.prepare else {"readOnly": True})
    volumes: list[Object] = [
        {"name": "scratch", "emptyDir": {"sizeLimit": pod.scratch}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pod.shm}},
        {"name": "models", "persistentVolumeClaim": claim},
    ]
    if values.tenants.secret is not None:
        # The whole directory, so that a changed registry is seen; no subPath, which would never change.
        volumes.append({"name": "tenants", "secret": {"secretName": values.tenants.secret, "defaultMode": 0o440}})
    if values.cache.secret is not None:
        volumes.append(password_volume("cache-password", values.cache.secret))
    return volumes


def password_volume(name: str, secret: str) -> Object:
    items = [{"key": "password", "path": "password"}]
    return {"name": name, "secret": {"secretName": secret, "items": items, "defaultMode": 0o440}}


def _preparation(values: DeployValues, component: str) -> list[Object]:
    """Fills the models' volume; whoever comes later finds it done."""
    commands = {"prepare-model": ["paceline", "model", "prepare", values.model.target]}
    if values.model.draft == "auto" and component == "draft":
        commands["build-drafter"] = ["paceline", "drafter", "build", "--keep", "--target", values.model.target]
    return [
        {
            "name": name,
            "image": image(values),
            "imagePullPolicy": values.image.pull_policy,
            "command": command,
            "env": _environment(values),
            "resources": _resources(values.draft),
            "securityContext": container_security(),
            "volumeMounts": [
                {"name": "scratch", "mountPath": "/tmp"},
                {"name": "models", "mountPath": _MODELS},
            ],
        }
        for name, command in commands.items()
    ]


def _drain(values: DeployValues) -> list[str]:
    limit_s = values.grace_s - ENDPOINTS_SETTLE_S
    return ["paceline", "k8s", "drain", "--settle-s", str(ENDPOINTS_SETTLE_S), "--limit-s", str(limit_s)]


def _probes(values: DeployValues, component: str) -> Object:
    """A pod lives as long as its raylet. Whether gateways, routers, targets and drafts get on is Serve's health check,
    which starts anew what stands still and not its neighbours. A router's pod is ready when its gateway says so."""
    alive = raylet = {"httpGet": {"path": "/api/local_raylet_healthz", "port": AGENT_PORT}}
    ready: Object = raylet
    failures = 3
    if component == "head":
        alive = ready = {"httpGet": {"path": "/api/gcs_healthz", "port": DASHBOARD_PORT}}
    elif component == "router":
        failures = 2
        ready = {"httpGet": {"path": "/readyz", "port": values.gateway.http_port}}
        if values.router.readiness == "grpc":
            ready = {"grpc": {"port": values.gateway.grpc_port}}
    return {
        "startupProbe": {**alive, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 60},
        "readinessProbe": {**ready, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": failures},
        "livenessProbe": {**raylet, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 12},
    }


def _spread(values: DeployValues, component: str) -> Object:
    """Two targets on one node would be lost together; routers go over zones where there are some."""
    strict = component == "target"
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname" if strict else "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "DoNotSchedule" if strict else "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(values, component)},
    }
