"""JSON text without its strings, for counting what it holds before it is parsed."""

from __future__ import annotations

import re

# A string, or the open end of one: it always matches, so that damaged text takes no longer than other text.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.?[^"\\]*+)*+"?', re.DOTALL)


def without_strings(data: bytes) -> bytes:
    """JSON text, valid or not, without strings and keys, which may hold any number of brackets and commas."""
    return _STRING.sub(b"", data)
