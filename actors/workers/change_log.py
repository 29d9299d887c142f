"""Tells callers what has changed since their last call."""

from __future__ import annotations

import secrets
from collections import deque
from itertools import islice

_KEPT = 4096  # whoever missed more gets everything


class ChangeLog:
    """The latest changes of a set of named things. The cost of `since` is proportional to the number of changes."""

    def __init__(self) -> None:
        self._life = secrets.randbits(62)  # identifies this log: marks of an earlier one are not valid here
        self._num_changes = 0
        self._names: deque[str] = deque(maxlen=_KEPT)

    @property
    def mark(self) -> tuple[int, int]:
        """The current state, to pass to `since` later."""
        return self._life, self._num_changes

    def note(self, name: str) -> None:
        """Record that `name` was added, changed or removed."""
        self._num_changes += 1
        self._names.append(name)

    def since(self, mark: tuple[int, int] | None) -> set[str] | None:
        """Names of what has changed; None: everything may have."""
        if mark is None or mark[0] != self._life:
            return None
        missed = self._num_changes - mark[1]
        return set(islice(reversed(self._names), missed)) if 0 <= missed <= len(self._names) else None
