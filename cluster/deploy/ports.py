"""The ports that Ray and Redis have in pods, by KubeRay's and Ray's own defaults."""

from __future__ import annotations

REDIS_PORT = 6379
GCS_PORT = 6379
DASHBOARD_PORT = 8265
METRICS_PORT = 8080
CLIENT_PORT = 10_001
AGENT_PORT = 52_365

_WORKER_PORTS = range(10_002, 20_000)
_OF_RAY = {
    GCS_PORT: "its control plane",
    DASHBOARD_PORT: "its dashboard",
    METRICS_PORT: "its metrics",
    CLIENT_PORT: "its clients",
    AGENT_PORT: "its agents",
}


def what_ray_does_at(port: int) -> str | None:
    """None: nothing."""
    return _OF_RAY.get(port) or ("its workers" if port in _WORKER_PORTS else None)
