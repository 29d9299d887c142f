"""Kustomize directories: what `kubectl kustomize` makes of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from cluster.errors import ConfigError

FILES = ("kustomization.yaml", "kustomization.yml", "Kustomization")
_TIMEOUT_S = 60


def kustomization_in(directory: Path) -> Path | None:
    return next((directory / name for name in FILES if (directory / name).is_file()), None)


def build(directory: Path) -> tuple[str, str | None]:
    """The manifests, and what went wrong, if anything. Raises ConfigError without a program that can do it."""
    kubectl, kustomize = shutil.which("kubectl"), shutil.which("kustomize")
    if kubectl is None and kustomize is None:
        raise ConfigError(f"{directory}: to build it takes kubectl or kustomize; install one, or render it elsewhere")
    command = [kubectl, "kustomize"] if kubectl is not None else [str(kustomize), "build"]
    try:
        done = subprocess.run([*map(str, command), str(directory)], capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "", f"it took longer than {_TIMEOUT_S} s"
    if done.returncode:
        return "", " ".join(done.stderr.split()).removeprefix("error: ") or f"exit status {done.returncode}"
    return done.stdout, None
