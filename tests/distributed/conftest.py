"""One Ray for all tests of this folder. A start takes seconds; clusters come and go on it as applications of Serve."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import ray

from actors.workers.ray_environment import prepare_own_ray
from cluster.gateway_config import GatewayConfig
from paceline_testing.free_ports import free_ports


@pytest.fixture(scope="session")
def ray_here() -> None:
    prepare_own_ray("127.0.0.1", GatewayConfig().max_body_bytes)
    ray.init(
        address="local",
        num_cpus=16,
        num_gpus=4,  # as far as Ray knows
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 1024 * 1024,
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Ray ends with the folder's last test, or it would take time from all that this process tests afterwards. A test
    that has failed still has it when it runs once more."""
    result = yield
    if _is_here(item) and (nextitem is None or not _is_here(nextitem)):
        ray.shutdown()
    return result


def _is_here(item: pytest.Item) -> bool:
    return Path(__file__).parent in item.path.parents


@pytest.fixture(scope="session")
def ports() -> dict[str, int]:
    """The gateway's settings of ports, the same for all clusters, so that they share Serve's controller and proxy; and
    one gateway, which starts sooner than two."""
    return {"replicas": 1, **dict(zip(("http_port", "grpc_port"), free_ports(2), strict=True))}
