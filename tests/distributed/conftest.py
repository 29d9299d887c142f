"""One Ray for all tests of this folder. A start takes seconds; clusters come and go on it as applications of Serve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from actors.workers.ray_environment import prepare_own_ray


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    prepare_own_ray("127.0.0.1")
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 1024 * 1024,
    )
    yield
    ray.shutdown()
