"""`paceline serve` as a process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from paceline_testing.free_ports import free_ports


@contextlib.contextmanager
def serving(model_dir: Path, *options: str, home: Path | None = None) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """(the command in a process group of its own, its HTTP port); what is left of it at the end is killed."""
    http_port, grpc_port = free_ports(2)
    settings = [f"target.model={model_dir}", "draft.model=none", *options]
    settings += [f"gateway.http_port={http_port}", f"gateway.grpc_port={grpc_port}"]
    command = [str(Path(sys.executable).with_name("paceline")), "serve"]
    for setting in settings:
        command += ["--set", setting]
    environment = os.environ if home is None else {**os.environ, "PACELINE_HOME": str(home)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment
    ) as server:
        try:
            yield server, http_port
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)


def wait_for_line(server: subprocess.Popen[str], start: str) -> list[psutil.Process]:
    """The processes that have been started when the server has printed the line."""
    assert server.stdout is not None
    printed: list[str] = []
    for line in server.stdout:
        printed.append(line)
        if line.startswith(start):
            return psutil.Process(server.pid).children(recursive=True)
    raise AssertionError("".join(printed[-20:]))


def assert_ends(server: subprocess.Popen[str], started: list[psutil.Process]) -> None:
    assert server.wait(timeout=90) == 0
    _, left = psutil.wait_procs(started, timeout=15)
    assert not left
