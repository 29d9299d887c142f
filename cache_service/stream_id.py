"""Ids of stream entries, `<milliseconds>-<sequence number>`, as numbers that can be compared."""

from __future__ import annotations

import re

from cache_service.errors import FormatError

START = "0-0"
"""Before every entry."""

PATTERN = r"^(0|[1-9][0-9]{0,19})-(0|[1-9][0-9]{0,19})$"

_ID = re.compile(PATTERN)


def parse_id(text: str) -> tuple[int, int]:
    """Both numbers of an id; raises FormatError."""
    match = _ID.match(text)
    if match is None:
        raise FormatError("garbage", f"a stream id is {text[:50]!r}; it must be <milliseconds>-<sequence number>")
    return int(match[1]), int(match[2])


def id_after(text: str) -> str:
    """The smallest id after this one. Redis 6.2 and later know `(id` for it, but older proxies do not."""
    milliseconds, sequence = parse_id(text)
    if sequence < 2**64 - 1:
        return f"{milliseconds}-{sequence + 1}"
    return f"{milliseconds + 1}-0"
