"""A served model, and a client that tries its abilities on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.environments import HERE, REPOSITORY, Client


@dataclass(frozen=True)
class Served:
    url: str  # http://host:port
    grpc: str  # host:port
    model: str
    directory: str


@dataclass(frozen=True)
class Result:
    """errors: of each ability that was tried, "": it has it."""

    client: Client
    seconds: float
    log: Path
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def has_failed(self) -> bool:
        return not self.errors or any(self.errors.values())


@contextmanager
def serving(model_directory: Path) -> Iterator[Served]:
    """Serves a model from a process of its own."""
    paths = [str(REPOSITORY), str(REPOSITORY / "tests/support"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.clients.serve", str(model_directory)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Served(**json.loads(process.stdout.readline()))
        finally:
            process.stdin.close()


def run_client(client: Client, served: Served, log: Path, timeout_s: float = 600.0) -> Result:
    """log: where its output goes."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="paceline-client-") as scratch:
        lines = Path(scratch) / "report.jsonl"
        lines.touch()
        environment = {
            # Neither the checkout's packages nor what a developer has set for another server.
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENAI_"))},
            "PYTHONPATH": str(HERE / "shared"),
            "PACELINE_URL": served.url,
            "PACELINE_GRPC": served.grpc,
            "PACELINE_MODEL": served.model,
            "PACELINE_MODEL_DIR": served.directory,
            "PACELINE_REPORT": str(lines),
            "HOME": scratch,
            "HF_HUB_OFFLINE": "1",
            "NO_PROXY": "*",
        }
        error = ""
        with log.open("w") as output:
            try:
                done = subprocess.run(
                    client.command(), env=environment, cwd=scratch, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
                )  # fmt: skip
                error = f"exit status {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                error = f"still running after {timeout_s:.0f} s"
        told = [json.loads(line) for line in lines.read_text().splitlines()]
    errors = {str(each["ability"]): str(each["error"]) for each in told}
    if error and not any(errors.values()):
        errors["start"] = error
    return Result(client, time.monotonic() - began, log, errors)
