"""Counts of the router since it started, read by its metrics."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import Histogram

from actors.messages import VerifyResult

logger = logging.getLogger(__name__)

_WAIT_BOUNDS_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_STAGE_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


def _histogram(name: str, text: str, bounds: tuple[float, ...]) -> Callable[[], Histogram]:
    return partial(Histogram, name, text, buckets=bounds, registry=None)


_LATENESS = _histogram(
    "paceline_draft_lateness_seconds",
    "How long rounds waited for draft workers when all else was ready",
    _WAIT_BOUNDS_S,
)
_QUEUE_TIME = _histogram("paceline_request_queue_time_seconds", "From arrival to the first round", _STAGE_BOUNDS_S)
_PREFILL_TIME = _histogram(
    "paceline_request_prefill_time_seconds", "From the first round to the first token", _STAGE_BOUNDS_S
)


@dataclass(slots=True)
class RouterCounters:
    """Monotonic counts; the Counters are by source (a drafter's name) or by class of requests."""

    rounds: int = 0  # committed
    rows: int = 0  # computed by the target
    verify_s: float = 0.0  # the target's own time, without its head's
    head_s: float = 0.0
    refused: int = 0  # Overloaded
    unreachable: Counter[str] = field(default_factory=Counter)  # ObjectiveUnreachable among the refused, by class
    answers: Counter[str] = field(default_factory=Counter)  # begun and finished here, by class
    good_answers: Counter[str] = field(default_factory=Counter)  # answers within the objectives of their class
    emitted_tokens: int = 0
    draft_tokens: int = 0  # tree nodes verified
    drafted_tokens: Counter[str] = field(default_factory=Counter)  # the same, by the source with the highest confidence
    accepted_tokens: Counter[str] = field(default_factory=Counter)
    invalid_trees: Counter[str] = field(default_factory=Counter)
    drafter_errors: Counter[str] = field(default_factory=Counter)
    ready_drafts: int = 0  # drafts of sequences that a worker drafted ahead for, and had ready
    missed_drafts: int = 0  # the same, not ready
    draft_lateness: Histogram = field(default_factory=_LATENESS)
    queue_time: Histogram = field(default_factory=_QUEUE_TIME)
    prefill_time: Histogram = field(default_factory=_PREFILL_TIME)
    planner_rounds: Counter[str] = field(default_factory=Counter)  # by `PlannerDecision`
    proposed_nodes: int = 0  # before choosing; equal nodes of several sources count once
    awaited_drafts: int = 0  # answers of draft workers that rounds waited for
    late_drafts: int = 0  # awaited drafts that did not come in time
    stale_drafts: int = 0  # sequences a draft worker had lost
    stale_sequences: int = 0  # sequences the target had lost
    preempted: int = 0
    abandoned_rounds: int = 0
    ahead_sent: int = 0  # rounds sent while the target computed the one before
    ahead_used: int = 0  # rounds sent ahead that were carried out
    ahead_declined: int = 0  # declined because of poor drafts; the others were dropped, as after a failed round
    targets_lost: int = 0  # lost without having announced that they leave
    sink_faults: int = 0  # calls of the token sink that raised

    @property
    def wasted_rows(self) -> int:
        """Draft nodes computed and not accepted."""
        return self.draft_tokens - self.accepted_tokens.total()

    def count_drafter_error(self, name: str) -> None:
        """Call it while the exception is handled. The first error of each drafter is logged."""
        self.drafter_errors[name] += 1
        if self.drafter_errors[name] == 1:
            logger.warning(
                "drafter %s failed; its drafts are left out, further failures are only counted", name, exc_info=True
            )

    def count_round(self, result: VerifyResult) -> None:
        self.rounds += 1
        self.rows += max(0, result.rows)
        self.verify_s += max(0.0, result.elapsed_s)
        self.head_s += max(0.0, result.head_s)
