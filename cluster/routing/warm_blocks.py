"""The blocks of prompts that a target has lately computed, as far as its memory holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice


class WarmBlocks(dict[int, bool]):
    """A least recently used set, oldest first. Router and gateway each keep one and see nearly the same blocks in the
    same order, so that what one drops the other soon drops, too. The values tell which blocks are only assumed."""

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()
        self.capacity = capacity  # blocks

    def use(self, blocks: Iterable[int], *, is_assumed: bool = False) -> Sequence[int]:
        """The last one stays longest. Blocks that are known to be there remain so. Returns those that had to go."""
        pop = self.pop
        for block in blocks:
            self[block] = pop(block, is_assumed) and is_assumed
        if (excess := len(self) - self.capacity) <= 0:
            return ()
        # In one go: the beginning of a dictionary is looked for past all that was deleted there.
        gone = list(islice(self, excess))
        for block in gone:
            del self[block]
        return gone

    def drop_assumed(self, blocks: Iterable[int]) -> Sequence[int]:
        """Drop those of the blocks that are only assumed to be there. Returns them."""
        gone = [block for block in dict.fromkeys(blocks) if self.get(block)]
        for block in gone:
            del self[block]
        return gone

    def num_leading(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's blocks are there, from its beginning on."""
        for index, block in enumerate(blocks):
            if block not in self:
                return index
        return len(blocks)
