"""Options records refuse what YAML makes of words and numbers that were not meant."""

import pytest
from pydantic import ValidationError

from cache_service.options import KeepSeconds, Options, PollSeconds


class Record(Options):
    keep_s: KeepSeconds = 1
    poll_s: PollSeconds | None = None
    is_on: bool = False


def test_values_are_frozen_and_checked():
    record = Record(keep_s=2, poll_s=0.5, is_on=True)
    with pytest.raises(ValidationError, match="frozen"):
        record.keep_s = 3
    assert Record(poll_s=None) == Record()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep_s": True}, "True is no number"),
        ({"poll_s": False}, "False is no number"),
        ({"keep_s": 0}, "keep_s"),
        ({"poll_s": float("nan")}, "poll_s"),
        ({"other": 1}, "other"),
    ],
)
def test_wrong_values_are_named(given, message):
    with pytest.raises(ValidationError, match=message):
        Record(**given)
