"""The prefix cache of an aggregated group: how long the prefixes are whose KV it still has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from cluster.simulate.scripts import Prefixes


class PrefixMemory:
    """Drops the least recently used ones beyond its room."""

    def __init__(self, room: int) -> None:
        """room: tokens."""
        self._room = room
        self._tokens: OrderedDict[Hashable, int] = OrderedDict()
        self._total = 0

    def find(self, prefixes: Prefixes, most: int) -> int:
        """How many of a prompt's first tokens it has."""
        found = 0
        for key, count in prefixes:
            if key in self._tokens:
                self._tokens.move_to_end(key)
                found = max(found, min(self._tokens[key], count, most))
        return found

    def add(self, prefixes: Prefixes, length: int) -> None:
        """length: of the first and longest one, which may have grown."""
        for place, (key, count) in enumerate(prefixes):
            now = count if place else length
            self._total += now - self._tokens.get(key, 0)
            self._tokens[key] = now
            self._tokens.move_to_end(key)
        while self._total > self._room and self._tokens:
            self._total -= self._tokens.popitem(last=False)[1]
