"""What the target will answer: the seed of a request names its answer, as it determines a real one's tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

NO_TOKEN = 0

Prefixes = tuple[tuple[Hashable, int], ...]  # what a prompt begins with that others share, longest first: key, tokens


@dataclass(frozen=True, slots=True)
class Script:
    """One answer."""

    answer: np.ndarray  # int32
    tenant: int
    prefixes: Prefixes = ()
    blocks: Sequence[int] = ()  # of prompt and answer, see `prefix_blocks`

    def token(self, position: int) -> int:
        """The answer's token; beyond its end, where nothing is emitted any more, any token."""
        return int(self.answer[position]) if position < len(self.answer) else NO_TOKEN


class Scripts:
    """The answers of all requests under way, by seed."""

    def __init__(self) -> None:
        self._scripts: dict[int, Script] = {}
        self._seeds: Iterator[int] = count(1)

    def add(self, script: Script) -> int:
        seed = next(self._seeds)
        self._scripts[seed] = script
        return seed

    def __getitem__(self, seed: int) -> Script:
        return self._scripts[seed]

    def drop(self, seed: int) -> None:
        del self._scripts[seed]
