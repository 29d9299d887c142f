"""Where the pods live, how clients reach them, and what keeps enough of them there."""

from __future__ import annotations

from cluster.deploy.pods import Object, labels, metadata_of, priority_class, selector
from cluster.deploy.values import DeployValues

_PRIORITIES = {"serving": 100_000, "draft": 10_000}


def namespace(values: DeployValues) -> Object:
    enforced = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
    found = {"name": values.namespace, "labels": labels(values, "namespace") | enforced}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": found}


def account(values: DeployValues) -> Object:
    """Without any rights, and without a token in the pods."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata_of(values, values.name, "access"),
        "automountServiceAccountToken": False,
    }


def service(values: DeployValues) -> Object:
    """Routers that are ready, of the old cluster and the new one while there are two. KubeRay's own service has no port
    for gRPC, and every pod of Ray behind it."""
    ports = {"http": values.gateway.http_port, "grpc": values.gateway.grpc_port}
    protocols = {"http": "http", "grpc": "kubernetes.io/h2c"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_of(values, values.name, "router"),
        "spec": {
            "type": "ClusterIP",
            "selector": selector(values, "router"),
            "ports": [
                {"name": name, "port": port, "targetPort": name, "protocol": "TCP", "appProtocol": protocols[name]}
                for name, port in ports.items()
            ],
        },
    }


def claim(values: DeployValues) -> list[Object]:
    if values.model.create_claim is None:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata_of(values, values.model.claim, "models"),
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": values.model.create_claim}},
            },
        }
    ]


def priorities(values: DeployValues) -> list[Object]:
    """Where nodes are short, draft workers go first: without them answers are slower, and no others."""
    if not values.scheduling.priority_classes:
        return []
    told = {"serving": "Requests end without these pods.", "draft": "Requests are only slower without these pods."}
    return [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": priority_class(values, name), "labels": labels(values, "scheduling")},
            "value": value,
            "globalDefault": False,
            "preemptionPolicy": "PreemptLowerPriority",
            "description": told[name],
        }
        for name, value in _PRIORITIES.items()
    ]


def disruption_budgets(values: DeployValues) -> list[Object]:
    """With `minAvailable` as a number: of pods whose owner has no scale, as a RayCluster has none, Kubernetes knows no
    other. Targets leave one after the other; a node with the only one is drained when another is there. Neither Redis
    has one: each is a single pod, whose budget would hold every drain of its node for ever, and requests go on without
    it until it is back on another."""
    least = {"router": values.router.pods_that_stay}
    if values.router.pods_that_stay:
        least["target"] = max(1, values.target.min - 1)
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata_of(values, f"{values.name}-{component}", "scheduling"),
            "spec": {
                "minAvailable": number,
                "selector": {"matchLabels": selector(values, component)},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        }
        for component, number in least.items()
        if number
    ]
