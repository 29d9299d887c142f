"""Refusals in the log of a Serve replica."""

import io
import logging

import pytest

from actors.errors import Overloaded
from actors.workers.serve_log import SERVE_LOGGER, tell_refusals_briefly


@pytest.fixture
def logged():
    """What Serve's logger writes, as its replicas configure it."""
    logger, text = logging.getLogger(SERVE_LOGGER), io.StringIO()
    before = logger.filters[:]
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    tell_refusals_briefly()
    tell_refusals_briefly()

    def log(error):
        try:
            raise error
        except Exception:
            logger.exception("Request failed.")
        return text.getvalue()

    yield log
    logger.removeHandler(handler)
    logger.filters = before


def test_a_refusal_is_one_line_and_a_failure_keeps_its_traceback(logged):
    assert logged(Overloaded("80 requests wait", 2.5)) == (
        "INFO Request refused: Overloaded: 80 requests wait; retry after 2.5 s\n"
    )
    text = logged(ValueError("a bug"))
    assert "ERROR Request failed.\nTraceback" in text
    assert "ValueError: a bug" in text
