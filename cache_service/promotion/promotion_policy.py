"""When what several tenants have said becomes public, and when no longer: pure decisions, the caller brings the time.

All must hold: enough distinct tenants support a phrase, each counted once; it has waited since the last that was
needed came; it is short; nothing in it looks sensitive. Batches are decided for fixed times, so that nobody learns from
a phrase's appearance when somebody else has said it.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from cache_service.options import Options
from cache_service.promotion.phrases import MAX_PHRASE_TOKENS, Phrase

MIN_TENANTS = 5
"""Fewer distinct tenants never make a phrase public."""

NEVER = math.inf
"""When a tenant that has opted out supports phrases again."""

Verdict = Literal["public", "wait", "drop"]


class PromotionPolicy(Options):
    """What the gate asks of a phrase."""

    min_tenants: Annotated[int, Field(ge=MIN_TENANTS, le=10_000)] = 20
    min_age_s: Annotated[int, Field(ge=0, le=2**31)] = 3600  # wait of a phrase after enough tenants support it
    release_every_s: Annotated[int, Field(ge=1, le=2**31)] = 3600  # batches appear at multiples of this, in Unix time
    max_tokens: Annotated[int, Field(ge=1, le=MAX_PHRASE_TOKENS)] = MAX_PHRASE_TOKENS
    window_s: Annotated[int, Field(ge=60, le=2**31)] = 7 * 24 * 3600  # how long a tenant supports a phrase it has said
    # Epsilon of the Laplace mechanism on the number of tenants; None: no noise.
    noise_epsilon: Annotated[float | None, Field(ge=0.001, le=1000)] = None
    max_phrases: Annotated[int, Field(ge=1, le=2**18)] = 2**16  # public ones and those that wait
    # Phrases that one tenant may support a day; each takes some 300 bytes of Redis.
    tenant_offers: Annotated[int, Field(ge=1, le=2**31)] = 10_000

    @property
    def max_supporters(self) -> int:
        """Tenants that are remembered for a phrase, the latest: enough that some may leave."""
        return 4 * self.min_tenants


@dataclass(frozen=True, slots=True)
class Candidate:
    """A phrase that enough tenants supported at some time."""

    phrase_id: bytes
    phrase: Phrase
    reached_s: int  # Unix time at which there were enough of them
    seen_s: Mapping[bytes, float]  # when each tenant last said it


def support_of(
    candidate: Candidate,
    since_s: Mapping[bytes, float],
    now_s: float,
    window_s: float,
    members: Set[bytes] | None = None,
) -> int:
    """How many tenants support a phrase. since_s: of tenants that opted out, when they began anew, or NEVER; members:
    those that may support any, None: all."""
    return sum(
        now_s - window_s <= seen_s
        and seen_s > since_s.get(tenant, -math.inf)
        and (members is None or tenant in members)
        for tenant, seen_s in candidate.seen_s.items()
    )


def verdict(
    candidate: Candidate, support: int, noise: float, is_sensitive: bool, policy: PromotionPolicy, batch_s: int
) -> Verdict:
    """What becomes of a candidate in the batch of Unix time `batch_s`. "drop": it has to gather support anew."""
    if is_sensitive or not 1 <= len(candidate.phrase) <= policy.max_tokens or support < policy.min_tenants:
        return "drop"
    # Noise never lets a phrase through that has too little support: it can only keep others waiting.
    if support + noise < policy.min_tenants or candidate.reached_s + policy.min_age_s > batch_s:
        return "wait"
    return "public"


def batch_time(now_s: float, policy: PromotionPolicy) -> int:
    """The last of the fixed times at which a batch is released."""
    return int(now_s) - int(now_s) % policy.release_every_s


def noise_of(secret: bytes, phrase_id: bytes, epsilon: float | None) -> float:
    """Laplace noise of scale 1/epsilon, always the same for a phrase: drawn anew, it would average out."""
    if epsilon is None:
        return 0.0
    drawn = hmac.digest(secret, b"noise\0" + phrase_id, hashlib.sha256)
    uniform = ((int.from_bytes(drawn[:8], "little") >> 12) + 0.5) / 2**52 - 0.5  # in (-1/2, 1/2), exactly
    return -math.copysign(math.log1p(-2.0 * abs(uniform)), uniform) / epsilon
