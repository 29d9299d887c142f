"""Makes foreign text safe for a terminal."""

from __future__ import annotations

import re

_NOT_PRINTABLE = re.compile(r"[^\n\t -~\xa0-\ud7ff\ue000-\U0010ffff]")


def printable(text: str) -> str:
    """Replace control characters, which could steer the terminal, and unpaired surrogates by U+FFFD."""
    return _NOT_PRINTABLE.sub("\ufffd", text)
