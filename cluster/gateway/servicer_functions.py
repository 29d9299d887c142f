"""The gRPC services of the gateway by import path, as Serve's options name them. Light, so that whoever writes such
options need not import Ray."""

from __future__ import annotations

SERVICER_FUNCTIONS = (
    "cluster.gateway.grpc_registration.add_inference",
    "cluster.gateway.grpc_registration.add_health",
)
