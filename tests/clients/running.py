"""A client that tries its abilities on a served model."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.environments import HERE, Client
from tests.clients.serve import Served


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


def run_client(
    client: Client, served: Served, log: Path, timeout_s: float = 600.0, python: str | None = None
) -> Result:
    """log: where its output goes. python: of another environment than its own."""
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
                    client.command(python), env=environment, cwd=scratch, stdin=subprocess.DEVNULL, stdout=output,
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
