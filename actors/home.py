"""Where Paceline keeps what it has prepared or measured on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def paceline_home() -> Path:
    """$PACELINE_HOME, else ~/.cache/paceline: prepared models, measured kernels and, by default, the cache's data."""
    return Path(os.environ.get("PACELINE_HOME") or "~/.cache/paceline").expanduser()
