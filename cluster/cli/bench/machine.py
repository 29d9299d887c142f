"""The machine and the versions of a measurement, printed beside it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TextIO

import psutil

_PACKAGES = ("paceline", "torch", "transformers", "numpy", "numba")


def describe_machine() -> dict[str, str | int | float]:
    """CPU model, cores this process may use, memory, load; torch's threads and GPU where torch is there."""
    import torch

    facts: dict[str, str | int | float] = {
        "cpu": _cpu_model(),
        "cores": _usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "torch_threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
    return facts


def describe_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # a checkout that was never installed
            versions[package] = "unknown"
    return versions


def print_machine(out: TextIO) -> None:
    print("machine   " + ", ".join(f"{key} {value}" for key, value in describe_machine().items()), file=out)
    print("versions  " + ", ".join(f"{key} {value}" for key, value in describe_versions().items()), file=out)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
