"""The component `multi-tenant`: everything is forbidden on the network but what is named, quotas, TLS at the gate."""

from __future__ import annotations

from cluster.deploy.pods import Object, metadata_of, selector
from cluster.deploy.ports import AGENT_PORT, DASHBOARD_PORT, METRICS_PORT, REDIS_PORT
from cluster.deploy.ray_service import worker_groups
from cluster.deploy.values import DeployValues, PodValues, number_of

COMPONENT = "tenancy"

_RAY = ("head", "router", "target", "draft")


def tenancy(values: DeployValues) -> list[Object]:
    return [*network_policies(values), *quotas(values), *gate(values)]


def network_policies(values: DeployValues) -> list[Object]:
    """Default: deny. Without DNS no cluster starts, so that comes next."""
    gateway = values.gateway
    ray = [{"podSelector": _components(values, _RAY)}]
    clients = _namespaces(values.network.clients)
    monitoring = _namespaces(values.network.monitoring)
    operator = _namespaces((values.network.operator,))
    dns = {
        "to": [
            {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
                "podSelector": {"matchExpressions": [{"key": "k8s-app", "operator": "In", "values": _DNS}]},
            }
        ],
        "ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}],
    }
    redis = [{"podSelector": _components(values, ("cache", "gcs"))}]
    return [
        _policy(values, "deny", {}, ingress=[], egress=[]),
        _policy(values, "dns", {}, egress=[dns]),
        _policy(
            values, "ray", _components(values, _RAY), ingress=[{"from": ray}],
            egress=[{"to": ray}, {"to": redis, "ports": _tcp(REDIS_PORT)}],
        ),
        # The autoscaler beside the head asks Kubernetes for pods, at an address that is not known here.
        _policy(values, "autoscaler", _components(values, ("head",)), egress=[{"ports": _tcp(443, 6443)}]),
        _policy(
            values, "operator", _components(values, _RAY),
            ingress=[{"from": operator, "ports": _tcp(DASHBOARD_PORT, AGENT_PORT, gateway.http_port)}],
        ),
        _policy(
            values, "clients", _components(values, ("router",)),
            ingress=[{"from": clients, "ports": _tcp(gateway.http_port, gateway.grpc_port)}],
        ),
        _policy(
            values, "metrics", _components(values, _RAY), ingress=[{"from": monitoring, "ports": _tcp(METRICS_PORT)}]
        ),
        _policy(
            values, "gateway-metrics", _components(values, ("router",)),
            ingress=[{"from": monitoring, "ports": _tcp(gateway.http_port)}],
        ),
        _policy(
            values, "traces", _components(values, ("router",)),
            egress=[{"to": monitoring, "ports": _tcp(values.network.collector_port)}],
        ),
    ]  # fmt: skip


_DNS = ["kube-dns", "coredns", "node-local-dns"]


def quotas(values: DeployValues) -> list[Object]:
    """Room for what the groups may grow to, and for the second cluster of an upgrade."""
    counted: list[tuple[PodValues, int]] = [(values.head, 1)]
    counted += [(group, group.max) for group in worker_groups(values).values()]
    surge = {"None": 1.0, "NewCluster": 2.0}.get(values.upgrade.type, 1 + values.upgrade.max_surge_percent / 100)
    cpus = surge * sum(number_of(pod.cpu) * count for pod, count in counted) + 8
    memory = surge * sum(number_of(pod.memory) * count for pod, count in counted)
    memory += 2 * number_of(values.cache.memory) + number_of(values.gcs.memory) + 4 * 2**30
    gpus = surge * sum(pod.gpus * count for pod, count in counted)
    hard = {
        "requests.cpu": str(-int(-cpus // 1)),
        "requests.memory": f"{-int(-memory // 2**30)}Gi",
        "limits.memory": f"{-int(-memory // 2**30)}Gi",
        "requests.nvidia.com/gpu": str(-int(-gpus // 1)),
        "pods": str(-int(-surge * sum(count for _, count in counted) // 1) + 8),
        # The Gateway's own service lies in its own namespace; nothing else opens this one.
        "services.loadbalancers": "0",
        "services.nodeports": "0",
    }
    # Only of what says nothing itself, as KubeRay's own jobs do.
    limits = {
        "type": "Container",
        "default": {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "1Gi"},
        "defaultRequest": {"cpu": "100m", "memory": "256Mi", "ephemeral-storage": "256Mi"},
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": metadata_of(values, values.name, COMPONENT),
            "spec": {"hard": hard},
        },
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": metadata_of(values, values.name, COMPONENT),
            "spec": {"limits": [limits]},
        },
    ]


def gate(values: DeployValues) -> list[Object]:
    """TLS ends here, with the certificate of a Secret that the cluster's operator keeps."""
    network = values.network
    parent = [{"name": values.name, "sectionName": "https"}]
    gateway = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": metadata_of(values, values.name, COMPONENT),
        "spec": {
            "gatewayClassName": network.gateway_class,
            "listeners": [
                {
                    "name": "https",
                    "port": 443,
                    "protocol": "HTTPS",
                    "hostname": network.host,
                    "tls": {"mode": "Terminate", "certificateRefs": [{"kind": "Secret", "name": network.tls_secret}]},
                    "allowedRoutes": {"namespaces": {"from": "Same"}},
                }
            ],
        },
    }
    http = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": metadata_of(values, values.name, COMPONENT),
        "spec": {
            "parentRefs": parent,
            "hostnames": [network.host],
            "rules": [
                {
                    # Not /metrics, /-/routes and what else is for the inside.
                    "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                    "backendRefs": [{"name": values.name, "port": values.gateway.http_port}],
                    "timeouts": {"request": f"{values.gateway.request_timeout_s}s"},
                }
            ],
        },
    }
    grpc = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "GRPCRoute",
        "metadata": metadata_of(values, values.name, COMPONENT),
        "spec": {
            "parentRefs": parent,
            "hostnames": [network.host],
            "rules": [
                {
                    "matches": [{"method": {"type": "Exact", "service": service}}],
                    "backendRefs": [{"name": values.name, "port": values.gateway.grpc_port}],
                }
                for service in ("paceline.v1.Inference", "grpc.health.v1.Health")
            ],
        },
    }
    return [gateway, http, grpc]


def _policy(
    values: DeployValues,
    name: str,
    pods: Object,
    ingress: list[Object] | None = None,
    egress: list[Object] | None = None,
) -> Object:
    spec: Object = {"podSelector": pods, "policyTypes": []}
    if ingress is not None:
        spec["policyTypes"].append("Ingress")
        spec["ingress"] = ingress
    if egress is not None:
        spec["policyTypes"].append("Egress")
        spec["egress"] = egress
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata_of(values, f"{values.name}-{name}", COMPONENT),
        "spec": spec,
    }


def _components(values: DeployValues, names: tuple[str, ...]) -> Object:
    if len(names) == 1:
        return {"matchLabels": selector(values, names[0])}
    return {
        "matchLabels": {"app.kubernetes.io/instance": values.name},
        "matchExpressions": [{"key": "app.kubernetes.io/component", "operator": "In", "values": list(names)}],
    }


def _namespaces(names: tuple[str, ...]) -> list[Object]:
    chosen = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(names)}
    return [{"namespaceSelector": {"matchExpressions": [chosen]}}]


def _tcp(*ports: int) -> list[Object]:
    return [{"port": port, "protocol": "TCP"} for port in ports]
