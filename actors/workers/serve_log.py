"""What Serve logs of a replica's errors. It logs every one with its traceback, and a router that is full raises one for
each request that it refuses."""

from __future__ import annotations

import logging

from actors.errors import PacelineError

SERVE_LOGGER = "ray.serve"


def tell_refusals_briefly() -> None:
    """In this process, an error that is raised on purpose is one line without a traceback. May be called repeatedly."""
    logging.getLogger(SERVE_LOGGER).addFilter(_without_expected_traceback)  # adds the same one once


def _without_expected_traceback(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, PacelineError):
        record.msg, record.args = "Request refused: %s: %s", (type(error).__name__, error)
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True
