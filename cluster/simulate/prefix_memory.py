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
        self._tokens: OrderedDict[Hashable, int] = OrderedDict()  # length of each, least recently used first
        self._own: dict[Hashable, int] = {}  # of these, tokens that no shorter prefix has
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
        """Add a text with its prefixes, longest first. length: of the first one, which may have grown. What a prefix
        shares with the next shorter one takes room once."""
        lengths = [length, *(count for _, count in prefixes[1:]), 0]
        for place, (key, _) in enumerate(prefixes):
            own = lengths[place] - lengths[place + 1]
            self._total += own - self._own.get(key, 0)
            self._tokens[key], self._own[key] = lengths[place], own
            self._tokens.move_to_end(key)
        while self._total > self._room and self._tokens:
            key, _ = self._tokens.popitem(last=False)
            self._total -= self._own.pop(key)
