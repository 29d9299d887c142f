"""Imports of libraries that define very much."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """For imports: what they make stays, and looking through it again and again takes a tenth of their time. For one
    thread of a process at a time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
