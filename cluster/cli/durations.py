"""Lengths of time as people write and read them: 90s, 30m, 24h, 7d."""

from __future__ import annotations

import re

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parsed_seconds(text: str) -> int | None:
    """None: it is no such length."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    return None if match is None else int(match[1]) * _SECONDS[match[2]]


def shown_seconds(seconds: int) -> str:
    """In the largest unit of which there are two; never below 0."""
    for unit in "dhm":
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds // _SECONDS[unit]} {unit}"
    return f"{max(0, seconds)} s"
