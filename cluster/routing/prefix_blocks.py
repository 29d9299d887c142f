"""Prompts as chains of hashed blocks: equal hashes mean equal tokens up to the block's end, in one namespace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np

BLOCK_TOKENS = 64  # finer than what decides where a request goes: a block takes a few milliseconds of a large target
_HASH_BYTES = 8


def prefix_blocks(token_ids: np.ndarray, namespace: str, begin: Sequence[int] = ()) -> list[int]:
    """A hash of 64 bits for each whole block of the tokens, int32 [n], that covers all tokens up to its end. Hashes of
    first blocks are odd, all others even.

    namespace: in which prefixes are shared; the hashes of two of them have nothing in common. begin: the hashes of the
    first blocks of the same tokens in the same namespace, so that they are not computed again.
    """
    size = BLOCK_TOKENS * 4
    data = np.ascontiguousarray(token_ids[len(begin) * BLOCK_TOKENS :], dtype=np.int32).tobytes()
    blocks = list(begin)
    last = blocks[-1] if blocks else _hash(namespace.encode())
    for start in range(0, len(data) - size + 1, size):
        block = _hash(data[start : start + size], key=last.to_bytes(_HASH_BYTES, "little"))
        last = block & ~1 if blocks else block | 1
        blocks.append(last)
    return blocks


def first_blocks(blocks: Iterable[int]) -> list[int]:
    """Those of the blocks that begin a prompt."""
    return [block for block in blocks if block & 1]


@lru_cache(4096)
def namespace_block(namespace: str) -> int:
    """A hash that stands for the namespace itself: whether a router has lately drafted in it."""
    return _hash(namespace.encode(), person=b"namespace") & ~1


def _hash(data: bytes, *, key: bytes = b"", person: bytes = b"") -> int:
    return int.from_bytes(blake2b(data, digest_size=_HASH_BYTES, key=key, person=person).digest(), "little")
