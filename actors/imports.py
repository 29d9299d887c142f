"""Imports of libraries that define very much."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """For imports: what they make stays, and looking through it again and again takes a tenth of their time. Threads
    may do so at once; the first to end ends it for all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
