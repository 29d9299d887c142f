"""Budgets of a namespace by its hit rate: a pure function."""

from __future__ import annotations

from cache_service.formats.earnings import Earnings
from cache_service.log.fold_plan import FoldLimits

MIN_REQUESTS = 200
"""A namespace is judged after this many requests."""

MIN_HIT_RATE = 0.01
"""Hit rate from which on a namespace keeps its whole budget."""

_USELESS_DIVISOR = 8


def limits_by_hit_rate(limits: FoldLimits, earnings: Earnings) -> FoldLimits:
    """A namespace below MIN_HIT_RATE gets an eighth of its bytes, generation size and generation time, so that its
    entries expire soon. It gets them back when its hit rate rises."""
    hit_rate = earnings.hit_rate
    if earnings.requests < MIN_REQUESTS or hit_rate is None or hit_rate >= MIN_HIT_RATE:
        return limits
    return limits.model_copy(
        update={
            "max_bytes": max(1, limits.max_bytes // _USELESS_DIVISOR),
            "generation_tokens": max(1, limits.generation_tokens // _USELESS_DIVISOR),
            "generation_s": max(0.001, limits.generation_s / _USELESS_DIVISOR),
        }
    )
