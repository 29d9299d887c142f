"""Serves a model to clients over HTTP and gRPC, with reflection, in this process: a gateway over a local engine.

    python -m tests.clients.serve MODEL_DIRECTORY

Prints the addresses and the model's name as one line of JSON, and serves until its standard input ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.gateway_config import GatewayConfig
from paceline_testing.echo_gateway import served
from paceline_testing.engine_router import engine_service


@dataclass(frozen=True)
class Served:
    url: str  # http://host:port
    grpc: str  # host:port
    model: str
    directory: str


@contextmanager
def serving(model_directory: Path) -> Iterator[Served]:
    """Serves from another thread."""
    config = GatewayConfig()
    service = engine_service(model_directory, config, kv_cache_tokens=16_384, batch_size=2)
    with served(service, config) as (http, grpc):
        yield Served(f"http://{http}", grpc, service.model.name, str(model_directory))


def main() -> None:
    with serving(Path(sys.argv[1])) as served:
        print(json.dumps(asdict(served)), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
