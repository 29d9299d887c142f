"""The directory of numba's cache: beside the sources or in the user's cache or, if neither can be written, a private
temporary directory. numba fails without one."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def can_be_made(directory: Path) -> bool:
    """Whether files can be created in the directory, or the directory itself if it is missing."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)


def prepare_kernel_cache() -> None:
    """Set NUMBA_CACHE_DIR if needed. Call before numba is imported; child processes inherit it."""
    sources = Path(__file__).resolve().parent
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    if "NUMBA_CACHE_DIR" not in os.environ and not can_be_made(sources / "__pycache__") and not can_be_made(users):
        os.environ["NUMBA_CACHE_DIR"] = str(private_directory(Path(tempfile.gettempdir())))


def private_directory(parent: Path) -> Path:
    """A directory of this user that outlives the process, so that the next start compiles nothing. A new one if the
    name is taken by something that others could write, because its files are executed."""
    directory = parent / f"paceline-kernels-{os.geteuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError:
        found = None
    if found is not None and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return directory
    return Path(tempfile.mkdtemp(prefix="paceline-kernels-", dir=parent))
