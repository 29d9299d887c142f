"""What a router announces of its load: see `cluster.routing`."""

from __future__ import annotations

from collections.abc import Iterable

from actors.drafters.registry import CACHE
from cluster.router.counters import RouterCounters
from cluster.router.sequence import Sequence
from cluster.router.step_time import StepTimeCurve
from cluster.routing.router_load import RouterLoad

_RECENT = 256  # requests after which older ones count half
_USUAL_ROUNDS = 64.0  # of an answer, before any has ended


class AnswerCosts:
    """How many rounds answers take, how many rows a sequence has in a round, and what the shared cache brings, of the
    last few hundred requests."""

    def __init__(self, counters: RouterCounters) -> None:
        self._counters = counters
        self._before = self._counted(0)
        self._ended = self._turns = self._drafted = self._emitted = self._from_cache = 0.0

    def observe(self, num_ended: int) -> None:
        """num_ended: requests since the start."""
        counted = self._counted(num_ended)
        ended, turns, drafted, emitted, from_cache = (
            now - then for now, then in zip(counted, self._before, strict=True)
        )
        self._before = counted
        kept = 0.5 if self._ended >= _RECENT else 1.0
        self._ended = kept * self._ended + ended
        self._turns = kept * self._turns + turns
        self._drafted = kept * self._drafted + drafted
        self._emitted = kept * self._emitted + emitted
        self._from_cache = kept * self._from_cache + from_cache

    @property
    def answer_rounds(self) -> float:
        return max(1.0, self._turns / self._ended) if self._ended else _USUAL_ROUNDS

    @property
    def rows(self) -> float:
        """Rows that a sequence has in a round."""
        return 1.0 + (self._drafted / self._turns if self._turns else 0.0)

    @property
    def cache_gain(self) -> float:
        """Emitted tokens from the shared cache for each of the others: by this share, answers take more rounds without
        it."""
        others = self._emitted - self._from_cache
        return self._from_cache / others if others else 0.0

    def _counted(self, num_ended: int) -> tuple[int, int, int, int, int]:
        """Ended requests; a turn is one sequence's part in a round in which it emits."""
        counters = self._counters
        turns = counters.emitted_tokens - counters.accepted_tokens.total()
        from_cache = counters.accepted_tokens[CACHE]
        return num_ended, turns, counters.draft_tokens, counters.emitted_tokens, from_cache


def router_load(
    sequences: Iterable[Sequence],
    num_running: int,
    num_places: int,
    step_times: StepTimeCurve,
    costs: AnswerCosts,
    prefill_rows: int,
) -> RouterLoad:
    """sequences: running and waiting ones. prefill_rows: prompt rows of a round beside the running sequences."""
    uncomputed = [sequence.num_uncomputed for sequence in sequences]
    rows = round(costs.rows * num_running)
    one, all_places = round(costs.rows), round(costs.rows * num_places)
    round_s = step_times.seconds(max(1, one))
    longest_s = step_times.seconds(max(1, all_places))
    prompts_s = step_times.seconds(rows + prefill_rows) - (step_times.seconds(rows) if rows else 0.0)
    return RouterLoad(
        num_running=num_running,
        num_waiting=len(uncomputed) - num_running,
        num_places=num_places,
        backlog_tokens=sum(tokens for tokens in uncomputed if tokens > 1),
        token_s=prompts_s / prefill_rows,
        round_s=round_s,
        sequence_s=(longest_s - round_s) / max(1, num_places - 1),
        answer_rounds=costs.answer_rounds,
        cache_gain=costs.cache_gain,
    )
