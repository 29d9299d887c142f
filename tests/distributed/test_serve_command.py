"""`paceline serve` as a process: however it is told to stop, it ends itself and everything that it has started."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.cli.serve import _report_build, _start_building_drafter
from paceline_testing.free_ports import free_ports
from paceline_testing.tiny_models import save_tiny_model

NAMES = ("http_port", "grpc_port")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def serving(model_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own; what is left of it at the end is killed."""
    ports = free_ports(2)
    settings = [f"target.model={model_dir}", "draft.model=none", *map("gateway.{}={}".format, NAMES, ports)]
    command = [str(Path(sys.executable).with_name("paceline")), "serve"]
    for setting in settings:
        command += ["--set", setting]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as server:
        try:
            yield server
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)


def wait_for_line(server: subprocess.Popen[str], start: str) -> list[psutil.Process]:
    """The processes that have been started when the server has printed the line."""
    assert server.stdout is not None
    assert any(printed.startswith(start) for printed in server.stdout)
    return psutil.Process(server.pid).children(recursive=True)


def assert_ends(server: subprocess.Popen[str], started: list[psutil.Process]) -> None:
    assert server.wait(timeout=90) == 0
    _, left = psutil.wait_procs(started, timeout=15)
    assert not left


def test_nothing_is_left_of_a_server_that_gets_ctrl_c_while_the_model_is_loaded(model_dir):
    with serving(model_dir) as server:
        started = wait_for_line(server, "http ")
        assert started
        os.kill(server.pid, signal.SIGINT)
        assert_ends(server, started)


def test_a_server_on_loopback_listens_nowhere_else_and_nothing_is_left_after_sigterm_to_its_group(model_dir):
    with serving(model_dir) as server:
        started = wait_for_line(server, "ready")
        listeners = {process.name(): addresses for process in started if (addresses := listening(process))}
        # Serve binds one port of each replica to all interfaces, whatever is configured; Ray's token guards it.
        open_to_all = {name for name, addresses in listeners.items() if not all(map(is_loopback, addresses))}
        assert all(name.startswith("ray::ServeReplica") for name in open_to_all), listeners
        assert {"gcs_server", "raylet"} <= set(listeners)
        os.killpg(server.pid, signal.SIGTERM)
        assert_ends(server, started)


@pytest.mark.parametrize("seconds", [0.5, 2.0, 6.0])
def test_ctrl_c_during_the_start_is_no_traceback_and_leaves_nothing_behind(model_dir, seconds):
    with serving(model_dir) as server:
        time.sleep(seconds)
        os.killpg(server.pid, signal.SIGINT)
        time.sleep(0.1)  # a process that is being forked is there by now
        started = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
        printed, _ = server.communicate(timeout=90)
        assert server.returncode in (0, 130, -signal.SIGINT)
        assert "Traceback" not in printed
        assert "KeyboardInterrupt" not in printed
        _, left = psutil.wait_procs(started, timeout=15)
        assert not left
        with pytest.raises(ProcessLookupError):
            os.killpg(server.pid, 0)


def listening(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return [one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    return []


def is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def test_the_builder_of_the_drafter_ends_with_a_server_that_is_killed(smollm2_dir, tmp_path):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from cluster.cli.serve import _start_building_drafter\n"
        "print(_start_building_drafter(sys.argv[1], Path(sys.argv[2])).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(smollm2_dir), str(tmp_path / "progress")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        builder = psutil.Process(int(parent.stdout.readline()))
        time.sleep(1.0)  # the build itself takes a minute or more
        assert builder.is_running()
        assert builder.nice() >= 10
        parent.kill()
        _, left = psutil.wait_procs([builder], timeout=10)
        for process in left:
            process.kill()
        assert not left


def test_a_drafter_that_cannot_be_built_is_told_with_the_log_that_says_why(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    builder = _start_building_drafter(str(tmp_path / "absent"), tmp_path / "progress")
    _report_build(builder, tmp_path / "drafter", tmp_path / "progress", threading.Event()).join(timeout=60)
    out, err = capfd.readouterr()
    log = tmp_path / "drafter-build.log"
    assert (out, err) == ("", f"draft   {tmp_path / 'drafter'} could not be built (exit status 2); see {log}\n")
    assert "absent" in log.read_text()


@pytest.mark.parametrize(("is_stopping", "told"), [(False, "draft   /the/drafter is built\n"), (True, "")])
def test_a_drafter_that_is_there_is_told_but_not_the_end_of_the_server(is_stopping, told, tmp_path, capfd):
    stop = threading.Event()
    if is_stopping:
        stop.set()
    with subprocess.Popen(["false" if is_stopping else "true"]) as builder:
        _report_build(builder, Path("/the/drafter"), tmp_path / "progress", stop).join(timeout=60)
    assert capfd.readouterr() == (told, "")
