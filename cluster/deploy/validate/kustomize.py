"""Kustomize directories: what `kubectl kustomize` makes of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

from cluster.errors import ConfigError

# How kubectl begins its errors: with the time and its process, which would make a finding another one each time.
_LOG_HEADER = re.compile(r'^(error: |[EF]\d{4} [\d:.]+ +\d+ \S+\] "command failed" err=[<"]?\s*)')
_CREDENTIALS = re.compile(r"//[^/@\s]+@")  # of a base in another repository

FILES = ("kustomization.yaml", "kustomization.yml", "Kustomization")


def kustomization_in(directory: Path) -> Path | None:
    return next((directory / name for name in FILES if (directory / name).is_file()), None)


def build(directory: Path, timeout_s: float = 60.0) -> tuple[str, str | None]:
    """The manifests, and what went wrong, if anything. Raises ConfigError without a program that can do it."""
    kubectl, kustomize = shutil.which("kubectl"), shutil.which("kustomize")
    if kubectl is None and kustomize is None:
        raise ConfigError(f"{directory}: to build it takes kubectl or kustomize; install one, or render it elsewhere")
    command = [kubectl, "kustomize"] if kubectl is not None else [str(kustomize), "build"]
    # git, its child, fetches bases in other repositories, and must neither ask for a password nor outlive it.
    with subprocess.Popen(
        [*map(str, command), "--enable-helm", str(directory)],  # for overlays that are made of charts, as ours
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"GIT_TERMINAL_PROMPT": "0"},
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return "", f"it took longer than {timeout_s:g} s"
    if process.returncode:
        return "", _plain(err) or f"exit status {process.returncode}"
    return out, None


def _plain(error: str) -> str:
    return _CREDENTIALS.sub("//...@", _LOG_HEADER.sub("", " ".join(error.split())))
