"""How many prompt rows a round computes."""

from __future__ import annotations

from math import inf

from actors.engine.options import RoundLimits
from cluster.config import MOST_PREFILL_ROWS, RouterConfig, SpeculationConfig
from cluster.router.draft_budget import most_draft_rows
from cluster.router.step_time import StepTimeCurve

_USUAL_ROWS = 256
_LEAST_ROWS = 8  # beside sequences that decode, on a slow target
_UNNOTICED_S = 0.1  # a round that short disturbs nobody who reads a stream
_MOST_SLOWDOWN = 4.0  # of a round that decodes, by the prompts beside it
_WORTH_DOUBLING = 1.8  # times as long for twice the rows: below, a prompt is sooner computed in larger rounds


def prefill_rows(step_times: StepTimeCurve, decoding: int, given: int | None) -> int:
    """Prompt rows of a round with `decoding` sequences that decode. given: router.max_prefill_rows.

    Unless given, a power of two from 256 on. It is doubled as long as that makes rows cheaper and lets those who
    decode wait at most four times as long as without prompts. Where 256 rows let them wait longer than that, and longer
    than a tenth of a second, there are fewer, 8 at least.
    """
    if given is not None:
        return given
    longest_s = _MOST_SLOWDOWN * step_times.seconds(decoding) if decoding else inf
    rows = _USUAL_ROWS
    while rows > _LEAST_ROWS and step_times.seconds(decoding + rows) > max(longest_s, _UNNOTICED_S):
        rows //= 2
    if rows < _USUAL_ROWS:
        return rows
    seconds = step_times.seconds(decoding + rows)
    while rows < MOST_PREFILL_ROWS:
        doubled_s = step_times.seconds(decoding + 2 * rows)
        if doubled_s > min(longest_s, _WORTH_DOUBLING * seconds):
            break
        rows, seconds = 2 * rows, doubled_s
    return rows


def rows_within(step_times: StepTimeCurve, decoding: int, rows: int, limit_s: float) -> int:
    """As many of the prompt rows as a round of limit_s has time for, or a few, so that prompts go on."""
    while rows > _LEAST_ROWS and step_times.seconds(decoding + rows) > limit_s:
        rows //= 2
    return rows


def round_limits(router: RouterConfig, speculation: SpeculationConfig) -> RoundLimits:
    """The largest round that a router with this configuration sends."""
    return RoundLimits(
        router.max_prefill_rows or MOST_PREFILL_ROWS,
        router.max_running,
        most_draft_rows(router, speculation),
        speculation.max_draft_tokens,
    )
