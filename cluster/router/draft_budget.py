"""How many draft rows a round may have."""

from __future__ import annotations

from cluster.config import MOST_DRAFT_ROWS, RouterConfig, SpeculationConfig
from cluster.router.step_time import StepTimeCurve

USUAL_DRAFT_ROWS = 64
_WORTH_DOUBLING = 1.8  # times as long for twice the rows: beyond, rows are dear


def draft_rows(step_times: StepTimeCurve, given: int | None, most: int) -> int:
    """Rows of a round for drafts and required rows. given: speculation.max_rows; most: as of `most_draft_rows`.

    Unless given, 64, doubled as long as that makes rows cheaper: a GPU that reads its weights anyway has room for the
    drafts of many sequences, where a CPU takes nearly twice as long for twice the rows.
    """
    if given is not None:
        return given
    rows = USUAL_DRAFT_ROWS
    seconds = step_times.seconds(rows)
    while rows < most:
        doubled_s = step_times.seconds(2 * rows)
        if doubled_s > _WORTH_DOUBLING * seconds:
            break
        rows, seconds = 2 * rows, doubled_s
    return min(rows, most)


def most_draft_rows(router: RouterConfig, speculation: SpeculationConfig) -> int:
    """The limit of `draft_rows`, which memory is kept for: there are no drafts for more."""
    if speculation.max_rows is not None:
        return speculation.max_rows
    return min(MOST_DRAFT_ROWS, max(USUAL_DRAFT_ROWS, router.max_running * speculation.max_draft_tokens))
