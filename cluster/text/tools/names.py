"""Which characters names of functions have."""

from __future__ import annotations

import string

from cluster.text.tools.reader import Reader, Steps
from cluster.text.tools.tool import MAX_NAME_CHARS

_NAME_CHARS = frozenset(string.ascii_letters + string.digits + "_-.:/")


def read_name(reader: Reader) -> Steps[str]:
    """The name that comes next; "" if there is none, or one that is too long."""
    return (yield from reader.characters(_NAME_CHARS, MAX_NAME_CHARS))
