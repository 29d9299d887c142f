"""`paceline serve`: a whole cluster with one command."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import typer

from cluster.cli.progress import progress_bars
from cluster.config import ClusterConfig, GatewayConfig, load_config, paceline_home
from cluster.errors import ConfigError

_DEFAULT_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "laptop.yaml"


def serve(
    config: Path = typer.Argument(None, help="Cluster configuration (YAML); by default configs/laptop.yaml."),
    settings: list[str] = typer.Option([], "--set", metavar="PATH.TO.KEY=VALUE", help="Override a setting."),
    address: str = typer.Option(None, help="Join the Ray cluster at this address instead of starting one here."),
) -> None:
    """Serve a model over HTTP and gRPC until Ctrl-C."""
    loaded = load_config(config or (_DEFAULT_CONFIG if _DEFAULT_CONFIG.is_file() else None), settings)
    if address is None:
        _require_free_ports(loaded.gateway)
    # Imports of seconds come after everything that can be wrong at once.
    from cluster.serve import plan_cluster

    with progress_bars() as progress:
        plan = plan_cluster(loaded, paceline_home(), progress)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    builder = _start_building_drafter(loaded) if plan.builds_drafter else None
    try:
        _run(plan, address, stop)
    finally:
        if builder is not None and builder.poll() is None:
            builder.terminate()
            builder.wait(timeout=10)


def _run(plan, address: str | None, stop: threading.Event) -> None:  # type: ignore[no-untyped-def]
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve as ray_serve

    from cluster.gateway.deployment import start_proxies
    from cluster.serve import APPLICATION, cluster_application

    config: ClusterConfig = plan.config
    typer.echo(
        f"target  {plan.info.name} ({plan.target.path}), {config.target.dtype} on {plan.target_device}, "
        f"tensor parallel {config.target.tensor_parallel}"
    )
    if plan.draft is not None:
        state = ", being built; picked up when it is there" if plan.builds_drafter else ""
        typer.echo(f"draft   {plan.draft.path}, {config.draft.workers} worker(s) on {plan.draft_device}{state}")
    else:
        typer.echo("draft   no draft model")
    if address is None:
        cpus = max(os.cpu_count() or 1, math.ceil(plan.num_cpus))
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="WARNING",
            namespace=APPLICATION,
        )
    else:
        ray.init(address=address, log_to_driver=False, logging_level="WARNING", namespace=APPLICATION)
    try:
        start_proxies(config.gateway)
        ray_serve.run(cluster_application(plan), name=APPLICATION, route_prefix="/", blocking=False)
        gateway = config.gateway
        typer.echo(f"http    http://{gateway.host}:{gateway.http_port}/v1")
        typer.echo(f"grpc    {gateway.host}:{gateway.grpc_port} (paceline.v1.Inference)")
        if _wait_until_ready(gateway, stop):
            typer.echo("ready")
        stop.wait()
        typer.echo("stopping", err=True)
    finally:
        if address is None:
            ray_serve.shutdown()
        else:
            ray_serve.delete(APPLICATION)
        ray.shutdown()


def _require_free_ports(gateway: GatewayConfig) -> None:
    for name, port in (("gateway.http_port", gateway.http_port), ("gateway.grpc_port", gateway.grpc_port)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((gateway.host, port))
            except OSError as error:
                raise ConfigError(
                    f"{name} is {port}: cannot listen on {gateway.host}:{port} ({error.strerror}); "
                    f"choose another with --set {name}=PORT"
                ) from None


def _wait_until_ready(gateway: GatewayConfig, stop: threading.Event) -> bool:
    """Poll /readyz until it says 200; False if told to stop before."""
    host = "127.0.0.1" if gateway.host in ("0.0.0.0", "::") else gateway.host
    while not stop.is_set():
        try:
            if httpx.get(f"http://{host}:{gateway.http_port}/readyz", timeout=5.0).status_code == 200:
                return True
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    return False


def _start_building_drafter(config: ClusterConfig) -> subprocess.Popen[bytes]:
    """Build the drafter beside the running cluster, at low priority; the draft workers wait for its directory."""
    command = [sys.executable, "-m", "cluster.cli.main", "drafter", "build", "--target", config.target.model]
    log = paceline_home() / "drafter-build.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            ["nice", "-n", "10", *command], stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
