"""What objectives ask of a round and of admission. Pure functions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from math import inf

from cluster.config import Objective
from cluster.router.sequence import Sequence
from cluster.router.step_time import StepTimeCurve

AIMED = 0.9  # of an objective: gateways and networks take the rest
_LEAST_PACE = 0.5  # of the rounds that an objective allows: streams that are behind must not stop prompts altogether


def round_limit_s(streams: Iterable[Sequence], tpot_s: float | None, now: float) -> float:
    """Seconds that a round may take so that each stream's next token is in time. Time that a stream has saved by faster
    rounds before may be spent."""
    if tpot_s is None:
        return inf
    limit_s = inf
    for stream in streams:
        progress = stream.progress
        if progress.first_at is None:
            continue
        emitted = stream.num_tokens - stream.num_prompt
        saved_s = progress.first_at + AIMED * tpot_s * emitted - now
        pace = emitted / max(1, progress.stats.rounds)
        limit_s = min(limit_s, max(saved_s, _LEAST_PACE * AIMED * tpot_s * pace))
    return limit_s


def is_within(objective: Objective, sequence: Sequence, now: float) -> bool:
    """Whether an answer that ends now has met its objective."""
    progress = sequence.progress
    first_at = now if progress.first_at is None else progress.first_at
    if objective.ttft_s is not None and first_at - progress.arrived_at > objective.ttft_s:
        return False
    later_tokens = sequence.num_tokens - sequence.num_prompt - 1
    return objective.tpot_s is None or now - first_at <= objective.tpot_s * later_tokens


def most_sequences(step_times: StepTimeCurve, limit_s: float, most: int) -> int:
    """How many sequences may decode in a round of limit_s; at least one."""
    if limit_s == inf:
        return most
    return max(1, bisect_right(step_times.times(1, most), limit_s))


def first_token_s(wait_s: float, backlog_rows: float, own_rows: float, row_s: float, round_s: float) -> float:
    """Expected seconds to a first token: the prompts before it are computed while it waits for a place, its own after;
    and it comes in the middle of a round."""
    return max(wait_s, backlog_rows * row_s) + own_rows * row_s + round_s
