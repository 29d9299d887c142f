"""Clusters on a Ray that a test has started."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import ray
from ray import serve

from actors.workers.directory_actor import find_directory
from cluster.config import ClusterConfig
from cluster.gateway.deployment import start_proxies
from cluster.ray_names import APPLICATION, DIRECTORY
from cluster.serve import cluster_application, plan_cluster
from paceline_testing.ray_processes import ray_processes

_START_WITHIN_S = 120.0
_LOOK_AGAIN_S = 0.5  # a look costs a connection, and the cluster the time it needs to do what is waited for


def wait_for(condition: Callable[[], bool], what: str, seconds: float = _START_WITHIN_S) -> None:
    """Raises AssertionError if the condition does not come true: a busy machine takes its time to start a process."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(_LOOK_AGAIN_S)


@contextmanager
def deployed(config: ClusterConfig, home: Path = Path("/nonexistent")) -> Iterator[str]:
    """The URL of a cluster with this configuration, ready; nothing is left of it after the block but Serve, which the
    next cluster with the same ports uses again."""
    try:
        start_proxies(config.gateway)
        serve.run(cluster_application(plan_cluster(config, home)), name=APPLICATION)
        url = f"http://127.0.0.1:{config.gateway.http_port}"
        wait_for(lambda: httpx.get(f"{url}/readyz", timeout=30).status_code == 200, "readiness")
        yield url
    finally:
        end_application()


def end_application() -> None:
    """Ends the cluster, and its directory, which would outlive it."""
    serve.delete(APPLICATION)
    with suppress(ValueError):  # no cluster was deployed
        ray.kill(find_directory(DIRECTORY))
    deadline = time.monotonic() + 30
    titles = ("ServeReplica:", "TargetRank", "DraftRank", "DirectoryActor", "RelayActor")
    while left := [title for title in titles if ray_processes(title)]:
        assert time.monotonic() < deadline, f"processes of the cluster are left: {left}"
        time.sleep(0.2)


def scale(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`paceline scale` against the cluster of this process; there may be others on this machine."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "cluster.cli.main", "scale", *arguments, "--address", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
