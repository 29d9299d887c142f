"""What drafts gain (Leviathan et al. 2023), drafted on request or one round ahead (SSD, arXiv 2603.03251).

Times may be in any one unit. Guesses are taken to be right independently of each other, each with the same probability.
"""

from __future__ import annotations


def tokens_per_round(acceptance: float, draft_tokens: int) -> float:
    """Expected tokens that a round emits; acceptance is in [0, 1].

    Of a chain of `draft_tokens` guesses those before the first wrong one, and one of the target's own.
    """
    if acceptance == 1.0:
        return draft_tokens + 1.0
    return (1.0 - acceptance ** (draft_tokens + 1)) / (1.0 - acceptance)


def round_on_request(verify: float, draft: float, network: float) -> float:
    """A round whose draft is asked for when the round begins, and waited for."""
    return draft + verify + network


def round_ahead(verify: float, draft: float, network: float, hit_rate: float) -> float:
    """A round whose draft was made while the target verified the last one; where it drafted for another outcome, with
    probability 1 - hit_rate, it is asked for and waited for."""
    return hit_rate * max(verify, draft) + (1.0 - hit_rate) * (verify + draft + network)
