"""Silences transformers: the command line shows progress itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_lock = threading.RLock()  # the settings below belong to the process


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the library's progress bars and everything below an error while the block runs."""
    from transformers.utils import logging

    with _lock:
        verbosity = logging.get_verbosity()
        bars = logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
