"""Settings of Serve's proxies, on both ways to them, and what a proxy then uses."""

import os
import pickle
import subprocess
import sys

import pytest

from cluster.gateway.door.front_door import SETTINGS_VARIABLE, FrontDoor
from cluster.gateway.grpc.registration import HostedGrpcOptions
from cluster.gateway_config import GatewayConfig
from cluster.tenants.access import TenantAccess

LOOK = """
import pickle, sys
import uvicorn
from ray.serve._private import default_impl, grpc_util, http_util
from ray.serve._private.request_router import replica_wrapper
from cluster.gateway.door.proxy_errors import middlewares

class Server:
    def add_insecure_port(self, address):
        print(address)

def look():
    found = middlewares()
    config = uvicorn.Config(lambda: None, factory=True)
    config.load()
    default_impl.add_grpc_address(Server(), "[::]:9000")
    print(config.http_protocol_class.max_connections)
    print(config.http_protocol_class.__name__, http_util.RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH)
    print(dict(grpc_util.DEFAULT_GRPC_SERVER_OPTIONS)["grpc.max_receive_message_length"])
    print(replica_wrapper.RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH)
    print([(one.kwargs["max_bytes"], one.kwargs["keys"] is not None) for one in found if "max_bytes" in one.kwargs])

look()
pickle.loads(bytes.fromhex(sys.argv[1]))  # as a proxy's process does before it makes the proxy
look()
"""


@pytest.mark.whole
def test_settings_come_from_the_environment_or_with_serves_options(tmp_path):
    access = TenantAccess(tmp_path / "tenants.json", may_be_open=False)
    door = FrontDoor.of(GatewayConfig(host="127.0.0.7", max_body_bytes=100_000, max_connections=70), access)
    options = pickle.dumps(HostedGrpcOptions(front_door=door)).hex()
    environment = {**os.environ, SETTINGS_VARIABLE: '{"max_body_bytes": 200000}'}
    command = [sys.executable, "-c", LOOK, options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    protocol = "LimitedHttpProtocol cluster.gateway.door.proxy_errors.middlewares"
    assert done.stdout.splitlines() == [
        "[::]:9000",
        "500",
        protocol,
        "265536",
        f"{1 << 30}",
        "[(200000, False)]",
        "127.0.0.7:9000",
        "70",
        protocol,
        "165536",
        f"{1 << 30}",
        "[(100000, True)]",
    ]


def test_a_proxy_starts_without_what_only_the_rest_of_a_cluster_needs():
    """While it starts after a loss, nobody is answered."""
    code = """
import sys
from cluster.gateway.door import proxy_errors
from cluster.gateway.grpc import registration
print(sys.modules.keys() & {"cluster.config", "actors.options", "redis", "prometheus_client", "transformers", "torch"})
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
