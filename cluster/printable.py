"""Foreign text on its way to a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Control characters, with which a model or a server could steer the terminal, become U+FFFD."""
    return "".join(
        char if (char >= " " and not "\x7f" <= char <= "\x9f") or char in "\n\t" else "\ufffd" for char in text
    )
