"""Foreign text on its way to a terminal."""

from __future__ import annotations

import re

_NOT_PRINTABLE = re.compile(r"[^\n\t -~\xa0-\ud7ff\ue000-\U0010ffff]")


def printable(text: str) -> str:
    """Control characters, with which a model or a server could steer the terminal, become U+FFFD, and so does what
    cannot be written at all: bytes of a file's name that are no text."""
    return _NOT_PRINTABLE.sub("\ufffd", text)
