"""Few different shapes for many different batches."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(4096)  # a call in a round costs less than counting
def row_tier(rows: int) -> int:
    """Rows that a forward of `rows` rows is padded to.

    There are few different shapes, because matrix libraries keep a kernel and memory for each shape.
    """
    if rows <= 2:
        step = 1
    elif rows <= 32:
        step = 4
    elif rows <= 128:
        step = 16
    elif rows <= 512:
        step = 32
    else:
        step = 64
    return -(-max(rows, 1) // step) * step


_FIRST_CONTEXT = 1024
_CONTEXT_STEP = 4


@lru_cache(4096)
def context_tier(slots: int) -> int:
    """Slots that a forward's longest sequence may have: 1024, 4096, 16384, ..."""
    tier = _FIRST_CONTEXT
    while tier < slots:
        tier *= _CONTEXT_STEP
    return tier


@lru_cache(4096)
def power_tier(count: int) -> int:
    """The next power of two; 0 stays."""
    return 1 << (count - 1).bit_length() if count else 0
