"""`paceline serve` as a process: however it is told to stop, it ends itself and everything that it has started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from actors.models.toy import save_tiny_model

NAMES = ("http_port", "grpc_port")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("line", "number", "to_the_group"),
    [("http ", signal.SIGINT, False), ("ready", signal.SIGTERM, True)],
    ids=["Ctrl-C while the model is loaded", "SIGTERM to the process group of a ready server"],
)
def test_nothing_is_left_of_a_server_that_was_told_to_stop(model_dir, line, number, to_the_group):
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], other.getsockname()[1]
    settings = [f"target.model={model_dir}", "draft.model=none", *map("gateway.{}={}".format, NAMES, ports)]
    command = [sys.executable, "-m", "cluster.cli.main", "serve"]
    for setting in settings:
        command += ["--set", setting]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        assert server.stdout is not None
        assert any(printed.startswith(line) for printed in server.stdout)
        started = psutil.Process(server.pid).children(recursive=True)
        assert started
        (os.killpg if to_the_group else os.kill)(server.pid, number)
        assert server.wait(timeout=90) == 0
        _, left = psutil.wait_procs(started, timeout=15)
        assert not left
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
