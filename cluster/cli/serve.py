"""`paceline serve`: a whole cluster with one command."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import typer

from actors.errors import Unavailable
from actors.home import paceline_home
from actors.workers.ray_environment import prepare_own_ray
from cluster.cli.interrupts import ctrl_c_ends_the_process
from cluster.cli.progress import progress_bars
from cluster.cli.ray_connection import gpus_of_nodes, listens, prepare_to_join, start_ray
from cluster.config import NO_CACHE, CacheConfig, ClusterConfig, load_config
from cluster.errors import ConfigError
from cluster.gateway_config import GatewayConfig
from cluster.ray_names import APPLICATION, DIRECTORY
from cluster.tenants.access import tenant_access

_ERROR_LINE = re.compile(r"[A-Za-z_.]+(Error|Exception|Unavailable|InvalidRequest): ")  # the end of a traceback
_HOPELESS = re.compile(r"actors\.errors\.(ModelError|InvalidRequest): ")  # the next try would fail the same way
_SERVE_SHUTDOWN_S = 60.0
_BUILD_PERIOD_S = 1.0  # between looks at how far the drafter's build is
_READY_PERIOD_S = 0.5  # between looks at whether the cluster is ready
_DEFAULT_CONFIG = Path("configs", "laptop.yaml")
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where a server that listens on all addresses is asked
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def serve(
    config: Path = typer.Argument(None, help="Cluster configuration (YAML); by default configs/laptop.yaml."),
    settings: list[str] = typer.Option([], "--set", metavar="PATH.TO.KEY=VALUE", help="Override a setting."),
    address: str = typer.Option(None, help="Join the Ray cluster at this address instead of starting one here."),
    no_draft_build: bool = typer.Option(
        False, "--no-draft-build", help="Build no draft model in the background; the same as --set draft.build=false."
    ),
) -> None:
    """Serve a model over HTTP and gRPC until Ctrl-C."""
    if no_draft_build:
        settings = [*settings, "draft.build=false"]
    loaded = load_config(config or default_config(), settings)
    _require_free_ports(loaded.gateway)
    if address is None:
        _require_certificates(loaded.gateway)
    _, warning = tenant_access(loaded, paceline_home())
    if address is not None:
        prepare_to_join(address)
    else:
        prepare_own_ray(loaded.gateway.host, loaded.gateway.max_body_bytes)
    with ctrl_c_ends_the_process():  # imports of seconds come after everything that can be wrong at once
        from actors.models.loader import choose_device
        from cluster.serve import device_elsewhere, plan_cluster

    with progress_bars() as progress:
        choose = choose_device if address is None else device_elsewhere
        plan = plan_cluster(loaded, paceline_home(), progress, choose)
    stop = threading.Event()
    _stop_on_signals(stop)
    builder = None
    if plan.draft is not None and plan.build_progress is not None:
        builder = _start_building_drafter(loaded.target.model, plan.build_progress)
        _report_build(builder, plan.draft.path, plan.build_progress, stop)
    if warning is not None:
        typer.echo(f"warning: {warning}", err=True)
    try:
        with _cache(plan) as planned:
            _run(planned, address, stop)
    finally:
        stop.set()
        if builder is not None:
            _end(builder)


def default_config() -> Path | None:
    """Where a checkout has it, or where a wheel has installed it; None: nowhere."""
    data = [sysconfig.get_path("data"), sysconfig.get_path("data", sysconfig.get_preferred_scheme("user"))]
    folders = [Path(__file__).resolve().parents[2], *(Path(path, "share", "paceline") for path in data)]
    return next((folder / _DEFAULT_CONFIG for folder in folders if (folder / _DEFAULT_CONFIG).is_file()), None)


def _stop_on_signals(stop: threading.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup outlives its terminal
            signal.signal(number, lambda *_: stop.set())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _cache(plan):  # type: ignore[no-untyped-def]
    """The plan with the cache that its routers get; it lasts as long as they may need it."""
    from cluster.cache.embedded_cache import cluster_cache

    wanted = plan.config.cache if plan.drafters else CacheConfig(url=NO_CACHE)
    with cluster_cache(wanted, lambda told: typer.echo(f"cache   {told}")) as cache:
        if cache.url != NO_CACHE and cache.regions.url is not None:
            typer.echo(f"regions {cache.regions.cluster}, shares with other clusters through {cache.regions.url}")
        yield replace(plan, config=plan.config.model_copy(update={"cache": cache}))


def _run(plan, address: str | None, stop: threading.Event) -> None:  # type: ignore[no-untyped-def]
    import ray
    from ray import serve as ray_serve

    from cluster.gateway.deployment import start_proxies
    from cluster.serve import cluster_application, told_gpu_shares, with_gpu_shares

    _tell_models(plan)
    if not _start_ray_unless_stopped(plan.num_cpus, address, stop):
        return
    _stop_on_signals(stop)  # Ray has put its own handler of SIGTERM in place
    if address is not None:
        _refuse_a_serve_that_runs(address)
    runs_serve = False
    try:
        gateway: GatewayConfig = plan.config.gateway
        plan = with_gpu_shares(plan, gpus_of_nodes())
        if (told := told_gpu_shares(plan)) is not None:
            typer.echo(f"gpus    {told}")
        if not stop.is_set():
            runs_serve = True
            start_proxies(gateway, plan.access)
        if not stop.is_set():
            application = ray_serve.RunTarget(cluster_application(plan), APPLICATION, "/")
            # Without waiting: a model may take minutes to load, and Ctrl-C must end that too.
            ray_serve.run_many(
                [application], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
            )
            _tell_addresses(gateway)
        if _wait_until_ready(gateway, stop):
            typer.echo("ready")
        stop.wait()
        typer.echo("stopping", err=True)
    finally:
        # Ray prints on stdout that calls of the controller that it ends have "infinite retries remaining".
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            if runs_serve and address is not None:
                _leave_ray()
            elif runs_serve:
                _end_serve()
            ray.shutdown()


def _tell_models(plan) -> None:  # type: ignore[no-untyped-def]
    config: ClusterConfig = plan.config
    typer.echo(
        f"target  {plan.info.name} ({plan.target.path}), dtype {config.target.dtype} on {plan.target_device}, "
        f"tensor parallel {config.target.tensor_parallel}"
    )
    if plan.draft is not None:
        state = ", being built while the server is idle (off: --no-draft-build)" if plan.builds_drafter else ""
        if plan.draft_has_own_vocabulary:
            state = ", with a vocabulary of its own: its drafts go by way of the text"
        typer.echo(f"draft   {plan.draft.path}, {config.draft.workers} worker(s) on {plan.draft_device}{state}")
    else:
        missing = config.draft.model == "auto" and not config.draft.build and config.draft.workers > 0
        advice = f"; run: paceline drafter build --target {config.target.model}" if missing else ""
        typer.echo(f"draft   no draft model{advice}")
    for name, planned in plan.more_drafts.items():
        state = ", with a vocabulary of its own" if planned.has_own_vocabulary else ""
        typer.echo(
            f"draft   {name}: {planned.source.path}, {planned.options.workers} worker(s) on {planned.device}{state}"
        )


def _tell_addresses(gateway: GatewayConfig) -> None:
    typer.echo(f"http    {_http_url(gateway)}/v1")
    typer.echo(f"grpc    {gateway.host}:{gateway.grpc_port} (paceline.v1.Inference)")
    if gateway.page:
        typer.echo(f"page    {_http_url(gateway)}/")
    if gateway.metrics_port is not None:
        typer.echo(f"metrics http://{gateway.metrics_host}:{gateway.metrics_port}/metrics")


def _start_ray_unless_stopped(num_cpus: float, address: str | None, stop: threading.Event) -> bool:
    """Whether Ray runs. Raises ConfigError if it cannot be started."""
    if stop.is_set():
        return False
    try:
        start_ray(num_cpus, address)
    except ConfigError:
        if stop.is_set():  # Ctrl-C ends processes of Ray that have just been forked, too
            return False
        raise
    return True


def _end_serve() -> None:
    """Serve's own end, as long as Ray is there: a signal to the whole process group has ended it as well, and Serve
    would wait in vain."""
    import ray
    from ray import serve as ray_serve

    gcs_address = ray.get_runtime_context().gcs_address
    ending = threading.Thread(target=ray_serve.shutdown, name="end of Serve", daemon=True)
    ending.start()
    until = time.monotonic() + _SERVE_SHUTDOWN_S
    while ending.is_alive() and time.monotonic() < until and listens(gcs_address):
        ending.join(0.5)


def _refuse_a_serve_that_runs(address: str) -> None:
    """Serve's ports and gRPC services are fixed when it starts, so what another has started cannot carry ours."""
    import ray
    from ray import serve as ray_serve

    names = ", ".join(sorted(ray_serve.status().applications)) or "none"
    if ray_serve.status().proxies:
        ray.shutdown()
        raise ConfigError(
            f"--address is {address!r}: Ray Serve runs there already (applications: {names}); "
            "its ports cannot be changed, so end it before"
        )


def _leave_ray() -> None:
    """Remove Paceline's applications and actors from a Ray cluster that keeps running."""
    import ray
    from ray import serve as ray_serve

    from actors.workers.directory_actor import find_directory

    if set(ray_serve.status().applications) <= {APPLICATION}:
        ray_serve.shutdown()
    else:
        ray_serve.delete(APPLICATION)
    with contextlib.suppress(ValueError):
        ray.kill(find_directory(DIRECTORY))


def _require_free_ports(gateway: GatewayConfig) -> None:
    for name, host in (
        ("gateway.http_port", gateway.host),
        ("gateway.grpc_port", gateway.host),
        ("gateway.metrics_port", gateway.metrics_host),
    ):
        port = getattr(gateway, name.removeprefix("gateway."))
        if port is None:
            continue
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ConfigError(
                    f"{name} is {port}: cannot listen on {host}:{port} ({error.strerror}); "
                    f"choose another with --set {name}=PORT"
                ) from None


def _http_url(gateway: GatewayConfig) -> str:
    scheme = "http" if gateway.tls.certificate_file is None else "https"
    return f"{scheme}://{f'[{gateway.host}]' if ':' in gateway.host else gateway.host}:{gateway.http_port}"


def _require_certificates(gateway: GatewayConfig) -> None:
    """Raises InvalidRequest if the files of `gateway.tls` cannot be used: the proxies would tell it in their logs."""
    if gateway.tls.certificate_file is not None:
        from cluster.gateway.door.certificates import Certificates

        Certificates(gateway.tls)


def _wait_until_ready(gateway: GatewayConfig, stop: threading.Event) -> bool:
    """Poll /readyz until it says 200; False if told to stop before. Raises Unavailable when Serve gives up."""
    here = gateway.model_copy(update={"host": _EVERYWHERE.get(gateway.host, gateway.host)})
    url = f"{_http_url(here)}/readyz"
    told: set[str] = set()
    # Without verification: it is our own server, by an address that no certificate has.
    with httpx.Client(timeout=5.0, verify=False) as client:
        while not stop.is_set():
            try:
                if client.get(url).status_code == 200:
                    return True
            except httpx.HTTPError:
                pass
            _report_failed_starts(told)
            stop.wait(_READY_PERIOD_S)
    return False


def _report_failed_starts(told: set[str]) -> None:
    """One line on stderr for each new reason why a part did not start: Serve tries again for a while.

    Raises Unavailable if waiting is useless or Serve has given up.
    """
    from ray import serve as ray_serve
    from ray.serve.schema import ApplicationStatus, DeploymentStatus

    application = ray_serve.status().applications.get(APPLICATION)
    if application is None:
        return
    reason = application.message
    for name, deployment in application.deployments.items():
        if deployment.status == DeploymentStatus.HEALTHY or not deployment.message:
            continue
        lines = [line.strip() for line in deployment.message.splitlines() if _ERROR_LINE.match(line.strip())]
        if lines:
            reason = f"{name} did not start: {lines[-1]}"
            if _HOPELESS.match(lines[-1]):
                raise Unavailable(reason)
            if reason not in told:
                told.add(reason)
                typer.echo(reason, err=True)
    if application.status == ApplicationStatus.DEPLOY_FAILED:
        raise Unavailable(reason)


def _start_building_drafter(target: str, progress_file: Path) -> subprocess.Popen[bytes]:
    """Build the drafter beside the running cluster; the draft workers wait for its directory."""
    command = [sys.executable, "-m", "cluster.cli.main", "drafter", "build", "--keep"]
    command += ["--target", target, "--progress-file", str(progress_file)]
    log = _builder_log()
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("wb")
    except OSError as error:
        raise ConfigError(f"{log}: cannot be written: {error.strerror}; set PACELINE_HOME to another place") from None
    with output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C does not reach it
            preexec_fn=_yield_to_others,
        )


def _builder_log() -> Path:
    return paceline_home() / "drafter-build.log"


def _report_build(
    builder: subprocess.Popen[bytes], directory: Path, progress_file: Path, stop: threading.Event
) -> threading.Thread:
    """Tell in a thread each stage of the build and its end, unless it ends with the server."""

    def report() -> None:
        stage = ""
        while (status := builder.poll()) is None and not stop.wait(_BUILD_PERIOD_S):
            with contextlib.suppress(OSError):
                told = progress_file.read_text(encoding="utf-8")
                if (now := told.partition(",")[0]) and now != stage:
                    stage = now
                    typer.echo(f"draft   being built: {told}")
        if stop.is_set():
            return
        if status == 0:
            typer.echo(f"draft   {directory} is built")
        else:
            typer.echo(f"draft   {directory} could not be built (exit status {status}); see {_builder_log()}", err=True)

    thread = threading.Thread(target=report, name="drafter build", daemon=True)
    thread.start()
    return thread


def _yield_to_others() -> None:
    """Runs in the child: gives it the lowest priority, and makes it end with its parent, even after SIGKILL."""
    os.nice(19)
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        # Linux divides the processor among sessions first: without this the build would get as much as the cluster.
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as group:
            group.write("19")
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
