"""The public face: validates HTTP and gRPC requests, turns text into tokens, calls a router, streams text back.

May import: router, tenants, text and the single modules of cluster below them; actors; cache_service.
"""

# The gRPC services by import path, as Serve's options name them. Here, where they can be read without importing Ray.
SERVICER_FUNCTIONS = (
    "cluster.gateway.grpc.registration.add_inference",
    "cluster.gateway.grpc.registration.add_health",
)
