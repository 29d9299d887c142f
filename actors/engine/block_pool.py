"""Allocation of KV blocks, sharing of equal prefixes by hash, and LRU eviction.

Knows block numbers and token ids; keys and values live in `kv_cache.py`. A model with recurrent layers can go on after
a prefix only with their states after its last token, so a block may have such states attached.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np


def root_hash(namespace: str) -> bytes:
    """Parent hash of a namespace's first block: prefixes are shared inside one namespace only."""
    return hashlib.blake2b(namespace.encode(), digest_size=16).digest()


def block_hash(parent: bytes, token_ids: np.ndarray) -> bytes:
    """Identity of a full block: its tokens (int32) and, through the parent, all before them. 128 bits, so that nobody
    can construct a collision."""
    return hashlib.blake2b(parent + token_ids.astype(np.int32, copy=False).tobytes(), digest_size=16).digest()


@dataclass(slots=True)
class _Block:
    references: int = 0
    hash: bytes | None = None  # set once the block is full and computed; then its content never changes


class BlockPool:
    """A fixed number of KV blocks with reference counts.

    A block is *used* (references > 0), *cached* (no references, but findable by its hash until it is needed) or
    *blank*. Blank blocks are handed out first, then cached ones, least recently used first.
    """

    def __init__(
        self, num_blocks: int, block_size: int, prefix_cache: bool = True, *, max_cached_states: int = 0
    ) -> None:
        """max_cached_states: blocks that have states attached at a time; those found least recently lose theirs."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks is {num_blocks}, block_size is {block_size}; both must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.max_cached_states = max_cached_states
        self.clear()

    def clear(self) -> None:
        """Make every block blank. Sequences must have released their blocks before."""
        self._blocks = [_Block() for _ in range(self.num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(self.num_blocks))
        self._by_hash: dict[bytes, int] = {}
        self._states: OrderedDict[int, object] = OrderedDict()  # by block, the least recently found first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached ones included."""
        return len(self._free)

    def allocate(self, count: int, after: int = -1) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing changes) if there are too few.

        Takes the blocks that follow `after` while they are blank, because contiguous slots are read without a gather.
        Cached blocks are taken only if no blank one is left.
        """
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            candidate, oldest = after + 1, next(iter(self._free))
            if after < 0 or candidate not in self._free or self._is_blank(oldest) > self._is_blank(candidate):
                candidate = oldest
            del self._free[candidate]
            block = self._blocks[candidate]
            if block.hash is not None:
                del self._by_hash[block.hash]
                block.hash = None
                self._states.pop(candidate, None)
            block.references = 1
            taken.append(candidate)
            after = candidate
        return taken

    def _is_blank(self, number: int) -> bool:
        return self._blocks[number].hash is None

    def release(self, blocks: list[int]) -> None:
        """Drop one reference each. Blocks with a hash stay cached until they are needed."""
        # In reverse, so that the end of a sequence is evicted before its beginning, which more prompts share.
        for number in reversed(blocks):
            block = self._blocks[number]
            assert block.references > 0, f"block {number} released more often than taken"
            block.references -= 1
            if block.references == 0:
                self._free[number] = None
                if block.hash is None:
                    self._free.move_to_end(number, last=False)

    def find_prefix(self, namespace: str, token_ids: np.ndarray) -> tuple[list[int], list[bytes]]:
        """The longest run of cached full blocks at the start of token_ids (int32 [n]). Takes a reference on each.

        Returns the blocks and their hashes.
        """
        blocks: list[int] = []
        hashes: list[bytes] = []
        if not self.prefix_cache:
            return blocks, hashes
        parent = root_hash(namespace)
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            parent = block_hash(parent, token_ids[start : start + self.block_size])
            number = self._by_hash.get(parent)
            if number is None:
                break
            block = self._blocks[number]
            if block.references == 0:
                del self._free[number]
            block.references += 1
            blocks.append(number)
            hashes.append(parent)
        return blocks, hashes

    def publish(self, number: int, content: bytes) -> None:
        """Make a full, computed block findable under its hash. The first block published under a hash stays."""
        if self.prefix_cache and content not in self._by_hash:
            assert self._blocks[number].hash is None
            self._blocks[number].hash = content
            self._by_hash[content] = number

    def attach_states(self, content: bytes, states: object) -> None:
        """Keep states with the block of this hash, if it is there."""
        number = self._by_hash.get(content)
        if number is not None:
            self._states[number] = states
            self._states.move_to_end(number)
            if len(self._states) > self.max_cached_states:
                self._states.popitem(last=False)

    def deepest_states(self, blocks: list[int]) -> tuple[int, object | None]:
        """How many of these blocks there are up to the last one with states, and these states; else 0 and None."""
        for index in reversed(range(len(blocks))):
            if blocks[index] in self._states:
                self._states.move_to_end(blocks[index])
                return index + 1, self._states[blocks[index]]
        return 0, None
