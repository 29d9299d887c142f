"""A Ray cluster of several nodes on this machine, of which each can be lost as a machine is.

A node is what KubeRay makes of a pod: `ray start --block` with the pod's environment and the resources of its group.
Whoever uses it is no part of the cluster: like the operator, it speaks to the head's dashboard, with a token.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
import yaml

import cluster
from actors.workers.ray_environment import own_ray
from cache_service.store.embedded_server import EmbeddedServer
from cluster.gateway_config import GatewayConfig
from paceline_testing.free_ports import free_ports

_HOST = "127.0.0.1"
_MARK = "PACELINE_TESTS_NODE"  # in the environment of all processes of a node, and of nothing else
_STORE_BYTES = 80 * 2**20  # object store of each node; Ray takes no less than 75 MiB
_PATIENCE_S = 300.0
_START_S = 120.0  # limit of one try: `ray start` takes seconds, on a busy machine a minute, and sometimes hangs
_CODE = Path(cluster.__file__).resolve().parent.parent


class RayNode:
    """One node: its processes, and the ports of the proxy that Serve may put on it."""

    def __init__(self, name: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
        self.name = name
        self.http_port, self.grpc_port, agent_port, agent_grpc_port, runtime_port, metrics_port = free_ports(6)
        self._mark = f"{name}-{secrets.token_hex(8)}"
        own = {
            _MARK: self._mark,
            "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self.http_port),
            "RAY_SERVE_WORKER_PROXY_GRPC_PORT": str(self.grpc_port),
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += [f"--node-ip-address={_HOST}", f"--object-store-memory={_STORE_BYTES}"]
        command += ["--min-worker-port=0", "--max-worker-port=0"]
        command += [f"--dashboard-agent-listen-port={agent_port}", f"--dashboard-agent-grpc-port={agent_grpc_port}"]
        command += [f"--runtime-env-agent-port={runtime_port}", f"--metrics-export-port={metrics_port}"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *arguments],
                env={**environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.log = log

    @property
    def url(self) -> str:
        """URL of its Serve proxy."""
        return f"http://{_HOST}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"{_HOST}:{self.grpc_port}"

    @property
    def is_up(self) -> bool:
        return self._process.poll() is None

    @property
    def has_joined(self) -> bool:
        """Whether it has ever joined its cluster."""
        return b"Ray runtime started" in self.log.read_bytes()

    def processes(self) -> list[psutil.Process]:
        """Its living processes, whoever their parent is by now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark:
                    found.append(process)
            except psutil.Error:  # it ended just now, or is another user's
                continue
        return found

    def runs(self, process_ids: set[int]) -> bool:
        """Whether one of these processes runs on it."""
        return any(process.pid in process_ids for process in self.processes())

    def kill(self) -> None:
        """SIGKILL to everything that runs on it. Returns when all of it is gone."""
        while alive := self.processes():
            for process in alive:
                _signal(process, signal.SIGKILL)
            self._process.poll()  # or it would stay as a zombie
            psutil.wait_procs(alive, timeout=5)
        self._process.wait(timeout=10)

    def silence(self) -> None:
        """Stop its processes; connections stay open, as if its network were gone."""
        for process in self.processes():
            _signal(process, signal.SIGSTOP)


class RayNodes:
    """A head without room for work and the nodes that are added to it, on ports of their own, with Ray's token
    authentication and its state in a server of its own, which outlives the head. Nothing is ended but what it has
    started."""

    def __init__(self, health_check_s: float | None = None) -> None:
        """health_check_s: between two looks of the head at each node, of which five must fail; None: Ray's own 3 s."""
        self._environment = {}
        if health_check_s is not None:
            self._environment["RAY_health_check_period_ms"] = str(round(1000 * health_check_s))
        self._directory = Path(tempfile.mkdtemp(prefix="pl-ray-", dir="/tmp"))  # sockets need a short path
        self._token = secrets.token_hex(32)
        self._nodes: list[RayNode] = []
        self._state = EmbeddedServer(self._directory / "state")
        gcs_port, dashboard_port, client_port = free_ports(3)
        self._gcs = f"{_HOST}:{gcs_port}"
        self.dashboard = httpx.Client(
            base_url=f"http://{_HOST}:{dashboard_port}", headers={"Authorization": f"Bearer {self._token}"}, timeout=60
        )
        self._of_head = [
            *("--head", "--num-cpus=0", f"--port={gcs_port}", f"--ray-client-server-port={client_port}"),
            *(f"--dashboard-host={_HOST}", f"--dashboard-port={dashboard_port}"),
            f"--redis-password={self._state.settings.password}",
        ]
        try:
            self.start_head()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RayNodes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start_head(self) -> None:
        """The first one, or another where that was: after its loss, what the state of the cluster tells it is all that
        it knows. Returns when its dashboard answers."""
        self.head = self._join("head", self._of_head)
        self._wait_for_dashboard()

    def add(self, group: str, cpus: float) -> RayNode:
        """A node with the resources of the group's pods, among them one of the group's own name. Returns when it has
        joined."""
        resources = json.dumps({group: 1})
        return self._join(group, [f"--address={self._gcs}", f"--num-cpus={cpus:g}", f"--resources={resources}"])

    def deploy(self, serve_config: str) -> None:
        """Deploy as KubeRay does with a new `serveConfigV2`."""
        answer = self.dashboard.put("/api/serve/applications/", json=yaml.safe_load(serve_config))
        assert answer.is_success, answer.text

    def application(self, name: str = "paceline") -> dict[str, Any]:
        """Serve's `ray.serve.schema.ApplicationDetails`."""
        answer = self.dashboard.get("/api/serve/applications/")
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()["applications"].get(name, {})
        return found

    def replicas(self, state: str = "RUNNING") -> dict[str, set[str]]:
        """Ids of the replicas in that state, by deployment."""
        return {
            deployment: {replica["replica_id"] for replica in details["replicas"] if replica["state"] == state}
            for deployment, details in self.application().get("deployments", {}).items()
        }

    def processes_of(self, deployment: str) -> set[int]:
        """Ids of the processes of its running replicas."""
        replicas = self.application().get("deployments", {}).get(deployment, {}).get("replicas", [])
        return {replica["pid"] for replica in replicas if replica["state"] == "RUNNING"}

    def close(self) -> None:
        self.dashboard.close()
        for node in reversed(self._nodes):
            node.kill()
        self._state.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _join(self, name: str, arguments: list[str]) -> RayNode:
        """A node that is up. One that could not start, or has not after a while, is replaced, as a pod would be: on a
        busy machine, Ray gives up after half a minute."""
        deadline = time.monotonic() + _PATIENCE_S
        node, began = self._start(name, arguments), time.monotonic()
        while not node.has_joined:
            assert time.monotonic() < deadline, node.log.read_text()
            if not node.is_up or time.monotonic() > began + _START_S:
                node.kill()  # what it has left
                node, began = self._start(name, arguments), time.monotonic()
            time.sleep(0.1)
        return node

    def _start(self, name: str, arguments: list[str]) -> RayNode:
        path = os.pathsep.join(filter(None, [str(_CODE), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **own_ray(GatewayConfig().max_body_bytes), "PYTHONPATH": path}
        # A server of this process's own may have left it at "0", with which no node joins another.
        environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token} | self._environment
        if "--head" in arguments:
            environment |= {"RAY_REDIS_ADDRESS": self._state.url}
        else:
            environment |= {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}  # as KubeRay has it
        directory = self._directory / str(len(self._nodes))  # its own, as a pod's /tmp
        directory.mkdir()
        node = RayNode(name, [*arguments, f"--temp-dir={directory}"], environment, directory / "start.log")
        self._nodes.append(node)
        return node

    def _wait_for_dashboard(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not self._is_dashboard_up():
            assert self.head.is_up, self.head.log.read_text()
            assert time.monotonic() < deadline, self.head.log.read_text()
            time.sleep(0.1)

    def _is_dashboard_up(self) -> bool:
        try:
            return self.dashboard.get("/api/serve/applications/").is_success
        except httpx.HTTPError:
            return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
