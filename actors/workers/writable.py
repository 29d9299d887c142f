"""Whether a place can be written, asked before somebody fails there."""

from __future__ import annotations

import os
from pathlib import Path


def can_be_made(directory: Path) -> bool:
    """Whether the directory is there and files can be made in it, or it can be made."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)
