"""SplitMix64 as a hash (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).

The bits are part of contracts: noise of sampled tokens, keys of soft counts in the shared cache, and the choice of a
draft worker depend on them in every process.
"""

from __future__ import annotations

import numpy as np
from numba import njit

STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

_MASK = 2**64 - 1


def signed(value: int) -> int:
    """The int64 with the same 64 lowest bits."""
    return (value + 2**63) % 2**64 - 2**63


def finalize(value: int) -> int:
    """The finalizer, a bijection of 64-bit integers in which every input bit flips each output bit half the time."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


@njit(cache=True, nogil=True, inline="always")
def finalize_uint64(bits):  # type: ignore[no-untyped-def]
    """`finalize` of a uint64, for kernels."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(MIX_1)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(MIX_2)
    return bits ^ (bits >> np.uint64(31))


@njit(cache=True, nogil=True, inline="always")
def hash_pair(first, second):  # type: ignore[no-untyped-def]
    """64-bit hash of two int32, for kernels: multiplications and shifts of its own, cheaper than the finalizer. Its
    upper half is the better one."""
    key = (np.uint64(np.uint32(first)) << np.uint64(32)) | np.uint64(np.uint32(second))
    key *= np.uint64(STEP)
    key ^= key >> np.uint64(32)
    return key * np.uint64(0xD6E8FEB86659FD93)
