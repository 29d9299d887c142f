"""Directories in which the processes of one user on one node meet."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

log = logging.getLogger(__name__)


def is_private_directory(directory: Path) -> bool:
    """Create the directory if missing; whether only this user can enter it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        log.warning("nothing is shared on this node: %s cannot be made: %s", directory, error)
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        log.warning("nothing is shared on this node: %s is not a directory of this user alone (mode 0700)", directory)
        return False
    return True
