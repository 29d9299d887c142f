"""SplitMix64 as a hash (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).

The exact bits matter: every process must derive the same sampling noise, soft count keys and draft worker from them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

_MASK = 2**64 - 1


def signed(value: int) -> int:
    """The low 64 bits as an int64."""
    return (value + 2**63) % 2**64 - 2**63


def finalize(value: int) -> int:
    """The finalizer: a bijection of 64-bit integers with full avalanche."""
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
    """64-bit hash of two int32, for kernels: cheaper than the finalizer. Its upper 32 bits are mixed best."""
    key = (np.uint64(np.uint32(first)) << np.uint64(32)) | np.uint64(np.uint32(second))
    key *= np.uint64(STEP)
    key ^= key >> np.uint64(32)
    return key * np.uint64(0xD6E8FEB86659FD93)
