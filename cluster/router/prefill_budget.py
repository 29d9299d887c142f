"""How many prompt rows a round computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import numpy as np

from actors.engine.options import RoundLimits
from actors.messages import VerifyResult
from cluster.config import MOST_PREFILL_ROWS, RouterConfig, SpeculationConfig
from cluster.router.draft_budget import most_draft_rows
from cluster.router.round import RoundEntry
from cluster.router.step_time import StepTimeCurve

_USUAL_ROWS = 256
_LEAST_ROWS = 8  # beside sequences that decode, on a slow target
_UNNOTICED_S = 0.15  # a round that short disturbs nobody who reads a stream
_MOST_SLOWDOWN = 4.0  # of a short round that decodes, by the prompts beside it
_MOST_LONG_SLOWDOWN = 2.0  # of a longer one: prompts get half of the time at least
_LONGEST_ALONE_S = 1.0  # of more rows than usual where nobody decodes: who comes next waits for the round
_SAFE_SHARE = 0.95  # of the longest round: rows take longer the more tokens come before them
_WORTH_DOUBLING = 1.8  # times as long for twice the rows: below, a prompt is sooner computed in larger rounds


@dataclass(frozen=True, slots=True)
class PromptRound:
    """What a round with prompts took."""

    rows: int  # of prompts
    seconds: float


def prefill_rows(step_times: StepTimeCurve, decoding: int, given: int | None) -> int:
    """Prompt rows of a round with `decoding` sequences that decode. given: router.max_prefill_rows.

    Unless given, a power of two from 256 on. It is doubled as long as that makes rows cheaper and lets those who
    decode wait at most four times as long as without prompts, or without them those who come meanwhile one second.
    Where 256 rows let those who decode wait longer than both 0.15 seconds and twice as long as without prompts, there
    are as many rows as do not, at least 8.
    """
    if given is not None:
        return given
    longest_s = _longest_s(step_times, decoding)
    rows = rows_within(step_times, decoding, _USUAL_ROWS, longest_s)
    if rows < _USUAL_ROWS:
        return rows
    longest_s = min(longest_s, _MOST_SLOWDOWN * step_times.seconds(decoding)) if decoding else _LONGEST_ALONE_S
    seconds = step_times.seconds(decoding + rows)
    while rows < MOST_PREFILL_ROWS:
        doubled_s = step_times.seconds(decoding + 2 * rows)
        if doubled_s > min(longest_s, _WORTH_DOUBLING * seconds):
            break
        rows, seconds = 2 * rows, doubled_s
    return rows


def next_prefill_rows(step_times: StepTimeCurve, decoding: int, given: int | None, last: PromptRound | None) -> int:
    """As `prefill_rows`, at most as many as the last round lets expect to be in time. last: None: it had no prompts.

    A row takes longer the more tokens come before it, which times by rows do not tell. So on a slow target prompts
    begin with few rows, and have up to twice as many in each further round.
    """
    rows = prefill_rows(step_times, decoding, given)
    if given is not None or not decoding or rows >= _USUAL_ROWS:
        return rows
    if last is None:
        return _LEAST_ROWS
    decoding_s = min(step_times.seconds(decoding), last.seconds)
    row_s = (last.seconds - decoding_s) / max(1, last.rows)
    in_time = (_SAFE_SHARE * _longest_s(step_times, decoding) - decoding_s) / row_s if row_s else inf
    return min(rows, max(_LEAST_ROWS, int(min(in_time, 2 * last.rows))))


def rows_within(step_times: StepTimeCurve, decoding: int, rows: int, limit_s: float) -> int:
    """As many of the prompt rows as a round of limit_s has time for, or a few, so that prompts go on."""
    if step_times.seconds(decoding + rows) <= limit_s:
        return rows
    in_time = int(np.searchsorted(step_times.times(decoding + 1, rows), limit_s, side="right"))
    return min(rows, max(_LEAST_ROWS, in_time))


def prompt_round(entries: Iterable[RoundEntry], result: VerifyResult) -> PromptRound | None:
    """What the round took; None: it had no prompts."""
    planned = sum(entry.rows for entry in entries if entry.rows > 1 or not entry.emits)
    if not planned:
        return None
    return PromptRound(min(planned, result.rows), result.elapsed_s)  # some may have been in a cache


def _longest_s(step_times: StepTimeCurve, decoding: int) -> float:
    """The longest round that sequences which decode are to wait for."""
    return max(_UNNOTICED_S, _MOST_LONG_SLOWDOWN * step_times.seconds(decoding)) if decoding else inf


def round_limits(router: RouterConfig, speculation: SpeculationConfig) -> RoundLimits:
    """The largest round that a router with this configuration sends."""
    return RoundLimits(
        router.max_prefill_rows or MOST_PREFILL_ROWS,
        router.max_running,
        most_draft_rows(router, speculation),
        speculation.max_draft_tokens,
    )
