"""The blocks of prompts that a target has lately computed, as far as its memory holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class WarmBlocks(dict[int, None]):
    """A least recently used set, oldest first. Router and gateway each keep one and see nearly the same blocks in the
    same order, so that what one drops the other soon drops, too."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()
        self.capacity = capacity  # blocks

    def use(self, blocks: Iterable[int]) -> None:
        """The last one stays longest."""
        for block in blocks:
            self.pop(block, None)
            self[block] = None
        for _ in range(len(self) - self.capacity):
            del self[next(iter(self))]

    def num_leading(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's blocks are there, from its beginning on."""
        for index, block in enumerate(blocks):
            if block not in self:
                return index
        return len(blocks)
