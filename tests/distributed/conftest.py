"""One Ray for all tests of this folder. A start takes seconds; clusters come and go on it as applications of Serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from actors.workers.ray_environment import prepare_own_ray
from paceline_testing.free_ports import free_ports


@pytest.fixture(scope="session")
def ray_here() -> None:
    prepare_own_ray("127.0.0.1")
    ray.init(
        address="local",
        num_cpus=16,
        num_gpus=4,  # as far as Ray knows
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 1024 * 1024,
    )


@pytest.hookimpl(trylast=True)  # after the ends of clusters
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ray ends with the folder's last test, or it would take time from all that this process tests afterwards."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        ray.shutdown()


@pytest.fixture(scope="session")
def ports() -> dict[str, int]:
    """The gateway's settings of ports, the same for all clusters, so that they share Serve's controller and proxy; and
    one gateway, which starts sooner than two."""
    return {"replicas": 1, **dict(zip(("http_port", "grpc_port"), free_ports(2), strict=True))}
