"""When phrases become public, and when no longer: pure functions, the caller brings the time.

A phrase must be supported by enough distinct tenants, have waited since it reached that number, be short, and contain
nothing sensitive. Batches are decided for fixed times, so that the appearance of a phrase does not tell when somebody
said it.
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
"""Lower limit of min_tenants."""

NEVER = math.inf
"""The time of return of a tenant that has opted out."""

Verdict = Literal["public", "wait", "drop"]


class PromotionPolicy(Options):
    """Conditions for phrases."""

    min_tenants: Annotated[int, Field(ge=MIN_TENANTS, le=10_000)] = 20
    """Distinct tenants that must have generated a phrase."""
    min_age_s: Annotated[int, Field(ge=0, le=2**31)] = 3600
    """Seconds that a phrase waits after that."""
    release_every_s: Annotated[int, Field(ge=1, le=2**31)] = 3600
    """Phrases become readable together, at multiples of so many seconds."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_PHRASE_TOKENS)] = MAX_PHRASE_TOKENS
    """Tokens of a phrase."""
    window_s: Annotated[int, Field(ge=60, le=2**31)] = 7 * 24 * 3600
    """Seconds for which a tenant counts after it has generated a phrase."""
    noise_epsilon: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    """Epsilon of the Laplace noise on the number of tenants, which delays some phrases. null: no noise."""
    max_phrases: Annotated[int, Field(ge=1, le=2**18)] = 2**16
    """Phrases that are readable or wait to be."""
    tenant_offers: Annotated[int, Field(ge=1, le=2**31)] = 10_000
    """Phrases of one tenant that count in a day; each takes some 300 bytes of Redis."""

    @property
    def max_supporters(self) -> int:
        """Tenants remembered per phrase, the latest ones; more than min_tenants, because some may leave."""
        return 4 * self.min_tenants


@dataclass(frozen=True, slots=True)
class Candidate:
    """A phrase that once reached enough supporters."""

    phrase: Phrase
    reached_s: int  # Unix time at which it reached them
    seen_s: Mapping[bytes, float]  # when each tenant last said it


def support_of(
    candidate: Candidate,
    since_s: Mapping[bytes, float],
    now_s: float,
    window_s: float,
    members: Set[bytes] | None = None,
) -> int:
    """How many tenants support a phrase. since_s: when tenants that had opted out returned, or NEVER; members: those
    that may support phrases, None: all."""
    return sum(
        now_s - window_s <= seen_s
        and seen_s > since_s.get(tenant, -math.inf)
        and (members is None or tenant in members)
        for tenant, seen_s in candidate.seen_s.items()
    )


def verdict(
    candidate: Candidate, support: int, noise: float, is_sensitive: bool, policy: PromotionPolicy, batch_s: int
) -> Verdict:
    """Decide on a candidate in the batch of Unix time `batch_s`. "drop": it must gather support again."""
    if is_sensitive or not 1 <= len(candidate.phrase) <= policy.max_tokens or support < policy.min_tenants:
        return "drop"
    # Noise can only delay a phrase, never let one with too little support through.
    if support + noise < policy.min_tenants or candidate.reached_s + policy.min_age_s > batch_s:
        return "wait"
    return "public"


def batch_time(now_s: float, policy: PromotionPolicy) -> int:
    """The last multiple of release_every_s, at which batches are released."""
    return int(now_s) - int(now_s) % policy.release_every_s


def noise_of(secret: bytes, phrase_id: bytes, epsilon: float | None) -> float:
    """Laplace noise of scale 1/epsilon, constant per phrase, so that it does not average out."""
    if epsilon is None:
        return 0.0
    drawn = hmac.digest(secret, b"noise\0" + phrase_id, hashlib.sha256)
    uniform = ((int.from_bytes(drawn[:8], "little") >> 12) + 0.5) / 2**52 - 0.5  # in (-1/2, 1/2), exactly
    return -math.copysign(math.log1p(-2.0 * abs(uniform)), uniform) / epsilon
