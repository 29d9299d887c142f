"""Ids of stream entries, `<milliseconds>-<sequence number>`, as comparable numbers."""

from __future__ import annotations

import re

from cache_service.errors import FormatError

START = "0-0"
"""Precedes every entry."""

PATTERN = r"^(0|[1-9][0-9]{0,19})-(0|[1-9][0-9]{0,19})\Z"

_ID = re.compile(PATTERN)


def parse_id(text: str) -> tuple[int, int]:
    """(milliseconds, sequence number). Raises FormatError."""
    match = _ID.match(text)
    if match is None:
        raise FormatError("garbage", f"a stream id is {text[:50]!r}; it must be <milliseconds>-<sequence number>")
    return int(match[1]), int(match[2])
