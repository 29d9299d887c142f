"""Where numba keeps what it has compiled: beside the sources or in the user's cache, and where neither can be written,
as with a read-only root and home, in a private directory for temporary files. Without a place it refuses to work."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def can_be_made(directory: Path) -> bool:
    """Whether files can be made in the directory; if it is not there, whether it can be made."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)


def prepare_kernel_cache() -> None:
    """Before numba is imported. Processes that are started inherit it; what is set already is left alone."""
    sources = Path(__file__).resolve().parent
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    if "NUMBA_CACHE_DIR" not in os.environ and not can_be_made(sources / "__pycache__") and not can_be_made(users):
        os.environ["NUMBA_CACHE_DIR"] = str(private_directory(Path(tempfile.gettempdir())))


def private_directory(parent: Path) -> Path:
    """One for this user that outlives the process, so that the next start compiles nothing; a fresh one where that name
    is taken by something that others could write: what lies there is run."""
    directory = parent / f"paceline-kernels-{os.geteuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError:
        found = None
    if found is not None and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
        return directory
    return Path(tempfile.mkdtemp(prefix="paceline-kernels-", dir=parent))
