"""What a mistyped key may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), 1, 0.7)
    return f"; did you mean {close[0]}?" if close else ""
