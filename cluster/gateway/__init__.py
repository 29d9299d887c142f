"""The public face: validates HTTP and gRPC requests, turns text into tokens, calls a router, streams text back.

May import: router (status), tenants, text, generation options, configuration, names of namespaces in cache_service.
"""

# The gRPC services by import path, as Serve's options name them. Here, where they can be read without importing Ray.
SERVICER_FUNCTIONS = (
    "cluster.gateway.grpc_registration.add_inference",
    "cluster.gateway.grpc_registration.add_health",
)
