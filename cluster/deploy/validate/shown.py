"""Values in findings. Findings end up in logs that many can read, so secrets must not."""

from __future__ import annotations

import re

from cluster.deploy.validate.finding import Location

_MOST_LETTERS = 60
_SECRET = re.compile(r"passw|secret|token(?![si])|credential|api_?key|encryption", re.IGNORECASE)
# Where people write passwords under any name. A Secret has them in the first two.
_HOLDERS = frozenset(("data", "stringData", "env", "env_vars", "args", "command"))


def may_be_told(where: Location) -> bool:
    """Whether no secret is to be expected at a place."""
    return not any(part in _HOLDERS or _SECRET.search(str(part)) for part in where)


def shown(value: object, where: Location) -> str:
    """A wrong value at a place, as far as it may be told."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return repr(value)
    if not may_be_told(where) or "//" in str(value):
        return "a text" if isinstance(value, str) else "a number" if isinstance(value, int | float) else "a value"
    text = repr(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."
