"""aiperf, as it comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from contract import MODEL, MODEL_DIR, URL, ability, report


def profile(endpoint: str, *options: str) -> None:
    """Raises an error unless all requests were answered."""
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "-m", MODEL, "--url", URL]
    load = ["--tokenizer", MODEL_DIR, "--request-count", "3", "--isl", "24", "--osl", "8", "--ui", "none"]
    folder = Path(f"out-{endpoint}")
    # Offline it takes a tokenizer's directory for the name of a repository.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    more = ["--endpoint-type", endpoint, "--output-artifact-dir", str(folder), *options]
    subprocess.run([*command, *load, *more], env=environment, check=True)
    (written,) = folder.rglob("profile_export_aiperf.json")
    found = json.loads(written.read_text())
    assert found["request_count"]["avg"] == 3, found
    assert not found["error_summary"], found["error_summary"]


@ability("load")
def load() -> None:
    profile("chat", "--streaming")


@ability("text completions")
def text_completions() -> None:
    profile("completions", "--streaming")


if __name__ == "__main__":
    report()
