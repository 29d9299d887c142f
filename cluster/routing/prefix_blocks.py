"""Prompts as chains of hashed blocks: equal hashes mean equal tokens up to the block's end, in one namespace."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

import numpy as np

BLOCK_TOKENS = 64  # finer than what decides where a request goes: a block takes a few milliseconds of a large target
_HASH_BYTES = 8


def prefix_blocks(token_ids: np.ndarray, namespace: str) -> list[int]:
    """A hash of 64 bits for each whole block of the tokens, int32 [n], that covers all tokens up to its end.

    namespace: in which prefixes are shared; the hashes of two of them have nothing in common.
    """
    data = np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
    size = BLOCK_TOKENS * 4
    link = blake2b(namespace.encode(), digest_size=_HASH_BYTES).digest()
    blocks = []
    for start in range(0, len(data) - size + 1, size):
        link = blake2b(data[start : start + size], digest_size=_HASH_BYTES, key=link).digest()
        blocks.append(int.from_bytes(link, "little"))
    return blocks


@lru_cache(4096)
def namespace_block(namespace: str) -> int:
    """A hash that stands for the namespace itself: whether a router has lately drafted in it."""
    return int.from_bytes(blake2b(namespace.encode(), digest_size=_HASH_BYTES, person=b"namespace").digest(), "little")
