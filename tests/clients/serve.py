"""Serves a model to clients over HTTP and gRPC, with reflection, in one process: a gateway over a local engine.

    python -m tests.clients.serve MODEL_DIRECTORY

Prints the addresses and the model's name as one line of JSON, and serves until its standard input ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cluster.config import GatewayConfig
from paceline_testing.echo_gateway import served
from paceline_testing.engine_router import engine_service


def main() -> None:
    directory = Path(sys.argv[1])
    config = GatewayConfig()
    service = engine_service(directory, config, kv_cache_tokens=16_384, batch_size=2)
    with served(service, config) as (http, grpc):
        told = {"url": f"http://{http}", "grpc": grpc, "model": service.model.name, "directory": str(directory)}
        print(json.dumps(told), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
