"""The blocks of prompts that a target has lately computed, as far as its memory holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


class WarmBlocks:
    """A least recently used set. Router and gateway each keep one and see nearly the same blocks in the same order, so
    that what one drops the other soon drops, too."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity  # blocks
        self._blocks: dict[int, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[int]:
        """Oldest first."""
        return iter(self._blocks)

    def use(self, blocks: Iterable[int]) -> None:
        """The last one stays longest."""
        for block in blocks:
            self._blocks.pop(block, None)
            self._blocks[block] = None
        for _ in range(len(self._blocks) - self.capacity):
            del self._blocks[next(iter(self._blocks))]

    def clear(self) -> None:
        self._blocks.clear()

    def num_leading(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's blocks are there, from its beginning on."""
        known = self._blocks
        for index, block in enumerate(blocks):
            if block not in known:
                return index
        return len(blocks)
