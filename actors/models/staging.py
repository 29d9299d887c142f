"""Atomic creation of directories."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from actors.errors import ModelError


@contextlib.contextmanager
def directory_lock(final: Path) -> Iterator[None]:
    """Hold the lock of one directory, which need not exist. A second process waits.

    The kernel releases the lock of a killed process.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(final.parent / f".{final.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ModelError(f"{final}: cannot be written: {error.strerror or error}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def staged_directory(final: Path) -> Iterator[Path]:
    """Yield an empty directory beside `final` that replaces it when the block ends without an error.

    A reader sees the old directory, none for an instant, or the complete new one. Call it under `directory_lock`.
    """
    with contextlib.suppress(OSError):
        for leftover in final.parent.glob(f".{final.name}.new-*"):  # left by a process killed while it held the lock
            shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{final.name}.new-", dir=final.parent))
    try:
        yield staging
        staging.chmod(0o755)  # mkdtemp makes it private, and safetensors its files
        for path in staging.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
            _flush(path)
        if final.exists():
            retired = staging.with_name(f"{staging.name}-old")
            final.rename(retired)
            staging.rename(final)
            shutil.rmtree(retired, ignore_errors=True)
        else:
            staging.rename(final)
        _flush(final.parent)
    except OSError as error:
        raise ModelError(f"{final}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
