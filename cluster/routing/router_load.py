"""What a router says of its load, and the time that a request would take there."""

from __future__ import annotations

import msgspec


class RouterLoad(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Measured by the router; a request costs as many rounds as the last ones did."""

    num_running: int
    num_waiting: int
    num_places: int  # requests that may run at once
    backlog_tokens: int  # prompt tokens of open requests that are not computed yet
    token_s: float  # seconds that a prompt token takes
    round_s: float  # seconds of a round with one sequence
    sequence_s: float  # seconds that each further sequence adds to a round
    answer_rounds: float  # rounds of an answer
    # Share of rounds that an answer takes more without drafts out of the shared cache, as where the namespace is new.
    cache_gain: float = 0.0


class Ahead(msgspec.Struct, frozen=True):
    """What a request that went to a router now would have before it."""

    load: RouterLoad
    requests: float  # sent there since the router said what its load is
    tokens: float  # of their prompts, without those that are cached
    round_s: float  # seconds of the rounds of its own answer
    answers: float  # that end before it has a place, one after the other


def ahead_of(load: RouterLoad, requests: float = 0.0, tokens: float = 0.0) -> Ahead:
    """requests, tokens: as in `Ahead`."""
    before = load.num_running + load.num_waiting + requests
    return Ahead(
        load,
        requests,
        tokens,
        load.round_s + load.sequence_s * min(before, load.num_places - 1),
        max(0.0, before + 1 - load.num_places) / load.num_places,
    )


def expected_s(ahead: Ahead, num_tokens: float, *, answer_rounds: float, knows_namespace: bool) -> float:
    """Expected seconds until a request with `num_tokens` uncached prompt tokens is answered: its wait for a place, the
    prompts before it, its own prompt, and its rounds, which are longer the more sequences run.

    answer_rounds: one value for all compared routers. With a separate value, a router whose few answers were long would
    get no more requests and keep that value."""
    load = ahead.load
    answers = ahead.answers + (1.0 if knows_namespace else 1.0 + load.cache_gain)
    return answers * answer_rounds * ahead.round_s + (load.backlog_tokens + ahead.tokens + num_tokens) * load.token_s
