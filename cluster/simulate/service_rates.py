"""How fast exact groups have been: what aggregated ones go by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from cluster.router.prefill_budget import prefill_rows
from cluster.router.step_time import StepTimeCurve
from cluster.routing.router_load import RouterLoad
from cluster.simulate.forward_time import ForwardTimes, profile_of
from cluster.simulate.rounds import RoundCounts

_MOST_LOAD = 32


def _load(running: int) -> int:
    """Whether routers ask draft workers depends on the sequences' powers of two: see `DraftWait`."""
    return running.bit_length()


class Drafting:
    """Seconds of draft workers."""

    def __init__(
        self, by_running: Mapping[int, RoundCounts] = MappingProxyType({}), prompt_token_s: float = 0.0
    ) -> None:
        """by_running: of exact groups. prompt_token_s: for each token of all prompts."""
        self.prompt_token_s = prompt_token_s
        by_load: dict[int, RoundCounts] = {}
        for count, seen in by_running.items():
            by_load.setdefault(_load(count), RoundCounts()).add(seen)
        self._round_s = [0.0]
        for load in range(1, _MOST_LOAD):
            seen_at = by_load.get(load)  # a load that has not been seen is like the next smaller one
            self._round_s.append(self._round_s[-1] if seen_at is None else seen_at.draft_s / seen_at.rounds)

    def round_s(self, running: int) -> float:
        """A worker's seconds for a round of `running` sequences that decode, without prompts."""
        return self._round_s[_load(running)]


class ServiceRates:
    """Rounds that only decode, by their number of sequences, and what prompts add to them."""

    def __init__(
        self,
        by_running: Mapping[int, RoundCounts],
        times: ForwardTimes,
        most_prefill: int | None,
        tokens_per_round: Sequence[float] = (1.0,),
        drafting: Drafting | None = None,
        cache_gains: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """by_running: of exact groups. most_prefill: router.max_prefill_rows. tokens_per_round: of single requests.
        cache_gains: as in `RouterLoad`, by the answers that a router has given since its start."""
        speeds = np.asarray(tokens_per_round, np.float64)
        # To the mean one, so that rounds a token stay the same.
        self._speeds: list[float] = (speeds * (1.0 / speeds).mean()).tolist()
        known = sorted((count, seen) for count, seen in by_running.items() if seen.rounds and count)
        self._counts = [count for count, _ in known]
        self._round_s = [seen.seconds / seen.rounds for _, seen in known]
        self._tokens = [seen.tokens / seen.sequences for _, seen in known]
        self._rows = [seen.rows / seen.rounds for _, seen in known]
        self.drafting = drafting or Drafting()
        self._cache_gains = {0: 0.0, **dict(sorted(cache_gains.items()))}
        self._cache_gain = lru_cache(4096)(self._interpolated_gain)
        self._times = times
        self._curve = StepTimeCurve(profile_of(times), times.row_steps)
        self._most_prefill = most_prefill
        self._costs = lru_cache(4096)(self._computed_costs)
        self._table: dict[int, tuple[float, float, float, int]] = {}

    def of(self, running: int) -> tuple[float, float, float, int]:
        """Seconds, tokens of each sequence, and rows of a round; prompt rows that go beside them."""
        found = self._table.get(running)
        if found is None:
            budget = prefill_rows(self._curve, running, self._most_prefill)
            seconds, tokens, rows = 0.0, 1.0, 0.0
            if running:
                columns = (self._round_s, self._tokens, self._rows)
                seconds, tokens, rows = (float(np.interp(running, self._counts, column)) for column in columns)
            found = self._table[running] = seconds, tokens, rows, budget
        return found

    def speed(self, seed: int) -> float:
        """How many times as many tokens a round as others a request has."""
        return self._speeds[(seed * 2_654_435_761 >> 16) % len(self._speeds)]

    def load(
        self, running: int, waiting: int, places: int, backlog: int, answer_rounds: float, num_answers: int
    ) -> RouterLoad:
        """What a router would announce, as `cluster.router.load` reckons it. num_answers: since its start."""
        token_s, round_s, sequence_s = self._costs(running, places)
        return RouterLoad(
            num_running=running,
            num_waiting=waiting,
            num_places=places,
            backlog_tokens=backlog,
            token_s=token_s,
            round_s=round_s,
            sequence_s=sequence_s,
            answer_rounds=answer_rounds,
            cache_gain=self._cache_gain(num_answers),
        )

    def _interpolated_gain(self, num_answers: int) -> float:
        return float(np.interp(num_answers, list(self._cache_gains), list(self._cache_gains.values())))

    def _computed_costs(self, running: int, places: int) -> tuple[float, float, float]:
        """Seconds of a prompt token, of a round with one sequence, and of each further one."""
        _, _, rows, budget = self.of(running)
        own_rows = rows / running if running else self.of(1)[2]  # of a sequence
        times = self._times
        round_s, longest_s = (times.seconds(max(1, round(own_rows * count)), count, 0) for count in (1, places))
        prompts_s = times.seconds(round(rows) + budget, 1, 0, budget) - (
            times.seconds(round(rows), 1, 0) if rows else 0.0
        )
        return prompts_s / budget, round_s, (longest_s - round_s) / max(1, places - 1)

    def with_prompts(self, running: int, rows: int) -> float:
        """Seconds of a round with so many prompt rows beside `running` sequences that decode."""
        seconds, _, own_rows, _ = self.of(running)
        alone = self._times.seconds(round(own_rows), running, 0) if running else 0.0
        return seconds + self._times.seconds(round(own_rows) + rows, running + 1, 0, rows) - alone
