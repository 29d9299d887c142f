"""Smaller budgets for a namespace that hardly any request drafts from: a pure decision."""

from __future__ import annotations

from cache_service.formats.earnings import Earnings
from cache_service.log.fold_plan import FoldLimits

MIN_REQUESTS = 200
"""Requests that a namespace is judged by: of fewer, too little is known."""

MIN_HIT_RATE = 0.01
"""Share of requests that must have been saved a round for the namespace to be worth its whole budget."""

_USELESS_SHARE = 8


def limits_by_hit_rate(limits: FoldLimits, earnings: Earnings) -> FoldLimits:
    """The budgets of a namespace that has earned so much. One that next to no request has drafted from keeps an eighth
    of the bytes and tokens, and each generation for an eighth of the time: its entries sink, and are gone soon. It has
    all of it again when it is of use."""
    hit_rate = earnings.hit_rate
    if earnings.requests < MIN_REQUESTS or hit_rate is None or hit_rate >= MIN_HIT_RATE:
        return limits
    return limits.model_copy(
        update={
            "max_bytes": max(1, limits.max_bytes // _USELESS_SHARE),
            "generation_tokens": max(1, limits.generation_tokens // _USELESS_SHARE),
            "generation_s": max(0.001, limits.generation_s / _USELESS_SHARE),
        }
    )
