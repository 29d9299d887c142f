"""A real cluster on this machine, and what it shows of itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import httpx
import psutil

from paceline_testing.deployed import wait_for
from paceline_testing.free_ports import free_ports
from paceline_testing.ray_processes import ray_processes
from paceline_testing.scraped import value_of

_START_WITHIN_S = 300.0


@contextmanager
def serving(
    config: Path, settings: list[str], log: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """`paceline serve` with a configuration, until the end of the block. Gives its URL. environment: what else it has
    in it."""
    http_port, grpc_port = free_ports(2)
    ports = [f"gateway.http_port={http_port}", f"gateway.grpc_port={grpc_port}"]
    command = [sys.executable, "-m", "cluster.cli.main", "serve", str(config)]
    for setting in (*settings, *ports):
        command += ["--set", setting]
    url = f"http://127.0.0.1:{http_port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=written, start_new_session=True, env=os.environ | environment
        )
    try:
        wait_for(lambda: process.poll() is not None or _is_ready(url), "readiness", _START_WITHIN_S)
        assert process.poll() is None, f"paceline serve ended: see {log}"
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


GATEWAYS = "ServeReplica:paceline:Gateway"


def processor_s(title: str) -> float:
    """Seconds that the processes of Ray whose title begins so have computed."""
    times = [psutil.Process(process).cpu_times() for process in ray_processes(title)]
    return sum(spent.user + spent.system for spent in times)


_COUNTERS = {
    "rounds": "paceline_rounds_total",
    "rows": "paceline_target_rows_total",
    "target_s": "paceline_target_seconds_total",
    "router_s": "paceline_router_seconds_total",
    "tokens": "paceline_emitted_tokens_total",
}


class RoundMeter:
    """Rounds since it was made, by the router's metrics."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        page = httpx.get(f"{self._url}/metrics", timeout=30).text
        return {key: value_of(page, name) for key, name in _COUNTERS.items()}

    def read(self) -> dict[str, float]:
        now = self._read()
        return {key: now[key] - self._before[key] for key in now}
