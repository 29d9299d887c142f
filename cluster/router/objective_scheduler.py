"""The scheduler for request classes with objectives. It maximises the number of requests that meet their objectives.

- Interactive sequences go before batch ones. If one needs a place, a batch sequence is paused and keeps its KV. If a
  round with batch sequences would be too long for an interactive stream, they get no rows in it.
- Within a class, those whose first token can still be in time go first, tenants in fair turns.
- One of eight places goes to the request that has waited longest, which keeps it to its end, so that none starves.
  Every second of these goes to the oldest one whose first token can still be in time.
- A request that would probably miss its first token's objective because of requests before it is refused on arrival.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import get_args

from actors.errors import ObjectiveUnreachable, Overloaded
from actors.messages import ServiceClass
from cluster.config import RouterConfig
from cluster.router.fair_turns import FairTurns
from cluster.router.finish_rate import FinishRate
from cluster.router.objectives import AIMED, first_token_s, most_sequences, round_limit_s
from cluster.router.prefill_budget import prefill_rows
from cluster.router.scheduler import SHORTEST_RETRY_S, Scheduler
from cluster.router.sequence import Sequence
from cluster.router.step_time import StepTimeCurve
from cluster.router.turn_order import TurnOrder

_OLDEST_EVERY = 8  # one of this many places goes to the request that has waited longest
_KEPT_PLACES = 4  # such sequences keep at most one of this many places
_KEPT = 0.98  # decay of means over answers with each answer, and of the refused share with each arrival
_SCARCE = 0.5  # share of refused arrivals from which on the margin of admission is a whole standard deviation
_LONGEST_RETRY_S = 300.0  # with less, most clients of a long overload would be told the same time and return at once
_MOST_RETURNS = 10_000  # entries per class; with more, the longest retry time is returned
_FIRST_ANSWER = 128.0  # tokens, before any has ended
_CLASSES: tuple[ServiceClass, ...] = get_args(ServiceClass)


class _Answers:
    """Means over the last answers of a class."""

    def __init__(self) -> None:
        self.count = self.prompts = self.cached = self.tokens = self.rounds = 0.0

    def add(self, sequence: Sequence) -> None:
        self.count = _KEPT * self.count + 1.0
        self.prompts = _KEPT * self.prompts + sequence.num_prompt
        self.cached = _KEPT * self.cached + sequence.target.num_cached
        self.tokens = _KEPT * self.tokens + sequence.num_tokens - sequence.num_prompt
        self.rounds = _KEPT * self.rounds + sequence.progress.stats.rounds

    @property
    def length(self) -> float:
        return max(1.0, self.tokens / self.count) if self.count else _FIRST_ANSWER

    @property
    def uncached_share(self) -> float:
        return 1.0 - self.cached / self.prompts if self.prompts else 1.0

    @property
    def pace(self) -> float:
        """Tokens a round."""
        return max(1.0, self.tokens / self.rounds) if self.rounds else 1.0


class ObjectiveScheduler(Scheduler):
    """`paused` sequences have begun and lack a place."""

    def __init__(self, config: RouterConfig, block_size: int, step_times: StepTimeCurve) -> None:
        super().__init__(config, block_size)
        self.paused: list[Sequence] = []
        self._objectives = {kind: config.objectives.of(kind) for kind in _CLASSES}
        self._step_times = step_times
        self._turns = {kind: FairTurns() for kind in _CLASSES}
        self._rates = {kind: FinishRate() for kind in _CLASSES}
        self._answers = {kind: _Answers() for kind in _CLASSES}
        self._charged: dict[str, float] = {}  # tokens that a request's tenant has been charged for it
        self._kept: set[str] = set()  # requests that keep their places
        self._num_entered = 0
        self._num_oldest = 0  # turns of the oldest
        self._to_keep: Sequence | None = None  # the oldest, if it enters next
        self._returns: dict[ServiceClass, list[float]] = {kind: [] for kind in _CLASSES}  # retry times
        self._num_waiting: Counter[ServiceClass] = Counter()
        self._refused_share = dict.fromkeys(_CLASSES, 0.0)  # of recent arrivals
        self._orders: dict[ServiceClass, TurnOrder] = {}  # of waiting requests, valid before one round

    # Who waits

    @property
    def held(self) -> list[Sequence]:
        return self.running + self.paused

    def _observe_queue(self, now: float) -> None:
        for kind in _CLASSES:
            self._rates[kind].observe(self._num_queued_of(kind) > 0, now)

    def _num_queued_of(self, kind: ServiceClass) -> int:
        """Waiting sequences of the class in excess of its free places."""
        paused = len(self.paused) if kind == "batch" else 0
        return self._num_waiting[kind] + paused - self._num_free(kind)

    def _put_last(self, sequence: Sequence) -> None:
        super()._put_last(sequence)
        self._num_waiting[sequence.request.service_class] += 1

    def _take_out(self, sequence: Sequence) -> None:
        super()._take_out(sequence)
        self._num_waiting[sequence.request.service_class] -= 1

    def _waiting_of(self, kind: ServiceClass) -> list[Sequence]:
        if not self._num_waiting[kind]:
            return []
        return [sequence for sequence in self.waiting.values() if sequence.request.service_class == kind]

    def _num_free(self, kind: ServiceClass) -> int:
        """Places that sequences of the class may take."""
        if kind == "interactive":
            return max(0, self._places - sum(not self._may_pause(sequence) for sequence in self.running))
        return max(0, self._config.max_running - len(self.running) - self._num_waiting["interactive"])

    @property
    def _places(self) -> int:
        """How many interactive sequences may run, so that each has its tokens in time."""
        tpot_s = self._objectives["interactive"].tpot_s
        limit_s = math.inf if tpot_s is None else AIMED * tpot_s * self._answers["interactive"].pace
        return most_sequences(self._step_times, limit_s, self._config.max_running)

    def _may_pause(self, sequence: Sequence) -> bool:
        return _is_batch(sequence) and sequence.request_id not in self._kept

    # Admission

    def _check_room(self, sequence: Sequence, now: float) -> None:
        kind = sequence.request.service_class
        refusal = self._refusal(sequence, now)
        self._refused_share[kind] = _KEPT * self._refused_share[kind] + (1.0 - _KEPT) * (refusal is not None)
        if refusal is not None:
            raise refusal

    def _refusal(self, sequence: Sequence, now: float) -> Overloaded | None:
        kind, comes_back = sequence.request.service_class, not sequence.request.asks_another
        ttft_s = self._objectives[kind].ttft_s
        if ttft_s is not None:
            expected_s, alone_s = self._expected_first_token_s(sequence, now)
            # A prompt that takes longer by itself has nothing to gain by coming back.
            if expected_s > AIMED * ttft_s >= alone_s:
                seconds = expected_s - AIMED * ttft_s
                return ObjectiveUnreachable(
                    f"the first token would come in {expected_s:.1f} s; {ttft_s:g} s are promised to {kind} requests",
                    self._retry_after(sequence, seconds, now, comes_back),
                )
        queued = self._num_queued_of(kind)
        if queued >= self._config.max_waiting:
            return Overloaded(
                f"{queued} {kind} requests wait; the limit is {self._config.max_waiting}",
                self._retry_after(sequence, max(1.0, queued / 2) / self._ends_per_s(kind), now, comes_back),
            )
        return None

    def _retry_after(self, sequence: Sequence, seconds: float, now: float, comes_back: bool) -> float:
        """seconds: until there is room for one more. Clients that were refused before return one after the other, as
        places become free, and this one after them, or earlier if the router asked before has room earlier.

        comes_back: False: another router is asked instead, which counts its return.
        """
        kind, refusal = sequence.request.service_class, sequence.request.refusal
        returns = self._returns[kind]
        del returns[: bisect_right(returns, now)]
        is_full = len(returns) >= _MOST_RETURNS
        in_turn_s = _LONGEST_RETRY_S if is_full else seconds + len(returns) / self._ends_per_s(kind)
        retry_s = min(_LONGEST_RETRY_S, max(SHORTEST_RETRY_S, round(in_turn_s, 3)))
        if refusal is not None:
            retry_s = min(retry_s, refusal.retry_after_s)
        if comes_back and not is_full:
            insort(returns, now + retry_s)
        return retry_s

    def _expected_first_token_s(self, sequence: Sequence, now: float) -> tuple[float, float]:
        """Seconds to a first token, with what is before it and alone."""
        kind = sequence.request.service_class
        row_s = self._row_s()
        urgency, spent = self._urgency(kind, now), self._turns[kind].spent

        def rank(other: Sequence) -> tuple[tuple[bool, bool], float, int]:
            return urgency(other), spent(other.request.tenant), other.arrival

        own_rank = rank(sequence)
        ahead = [other for other in self._lacking_place(kind) if rank(other) < own_rank]
        lacking = max(0, len(ahead) + 1 - self._num_free(kind))  # places that must become free
        if kind == "batch":
            ahead += self._waiting_of("interactive")
        # Ends come at random: without a margin half of such requests are in time, with a standard deviation five of
        # six. Where few are refused, places that a margin keeps free would soon lack requests.
        deviations = min(1.0, self._refused_share[kind] / _SCARCE)
        wait_s = (lacking + deviations * math.sqrt(lacking)) / self._ends_per_s(kind)
        running = [other for other in self.running if other.num_uncomputed > 1 and not self._is_behind(other, sequence)]
        backlog = sum(self._prompt_rows(other) for other in (*running, *ahead))
        own, round_s = self._prompt_rows(sequence), self._round_s
        return first_token_s(wait_s, backlog, own, row_s, round_s), first_token_s(0.0, 0.0, own, row_s, round_s)

    def _ends_per_s(self, kind: ServiceClass) -> float:
        """Before any has ended, as if answers were of usual length."""
        places, answers = self._config.max_running, self._answers[kind]
        return self._rates[kind].per_second(places) or places * answers.pace / (answers.length * self._round_s)

    @property
    def _round_s(self) -> float:
        return self._step_times.seconds(max(1, len(self.running)))

    def _is_behind(self, other: Sequence, sequence: Sequence) -> bool:
        return self.gives_way(other) and not _is_batch(sequence)

    def _prompt_rows(self, sequence: Sequence) -> float:
        """Rows that its prompt will probably take."""
        share = 1.0 if sequence.target.num_computed else self._answers[sequence.request.service_class].uncached_share
        return share * sequence.num_uncomputed

    def _row_s(self) -> float:
        """Seconds a prompt row, in rounds as they are now."""
        decoding = len(self.running)
        rows = prefill_rows(self._step_times, decoding, self._config.max_prefill_rows)
        return self._step_times.seconds(decoding + rows) / rows

    # Order

    def _urgency(self, kind: ServiceClass, now: float) -> Callable[[Sequence], tuple[bool, bool]]:
        """A sort key of sequences of the class, the most urgent first: whether one has not begun, and whether its first
        token can no longer be in time."""
        ttft_s = self._objectives[kind].ttft_s
        row_s = 0.0 if ttft_s is None else self._row_s()

        def urgency(sequence: Sequence) -> tuple[bool, bool]:
            progress = sequence.progress
            has_begun = progress.started_at is not None or sequence.request.num_output_in_prompt > 0
            if ttft_s is None:
                return not has_begun, False
            return not has_begun, now + self._prompt_rows(sequence) * row_s > progress.arrived_at + ttft_s

        return urgency

    def _lacking_place(self, kind: ServiceClass) -> list[Sequence]:
        return self._waiting_of(kind) + (self.paused if kind == "batch" else [])

    @property
    def may_admit(self) -> bool:
        if len(self.running) < self._config.max_running:
            return bool(self.waiting or self.paused)
        return self._num_waiting["interactive"] > 0 and self._num_free("interactive") > 0

    def admit(self, free_blocks: int, now: float) -> None:
        super().admit(free_blocks, now)
        # Tenants that come until the next round begin where those who still wait are: they must not push aside whom
        # admission has promised a first token in time.
        for kind in self._orders:
            self._turns[kind].wait({sequence.request.tenant for sequence in self._lacking_place(kind)})
        self._orders.clear()

    def _next(self, now: float) -> Sequence | None:
        self._to_keep = None
        is_full = len(self.running) >= self._config.max_running
        if not (self.waiting or self.paused) or (is_full and not any(map(self._may_pause, self.running))):
            return None
        if self._is_turn_of_oldest:
            candidates = [*self.paused, *self.waiting.values()]
            oldest = self._oldest(candidates + list(filter(self._may_pause, self.running)), now)
            if oldest in candidates:
                self._to_keep = oldest
                return oldest
            self._keep(oldest)
            self._num_entered += 1
        if self._num_waiting["interactive"] and self._num_free("interactive"):
            return self._order("interactive", now).first()
        return None if is_full else self._order("batch", now).first()

    def _oldest(self, sequences: list[Sequence], now: float) -> Sequence:
        """By turns the oldest of those that have begun their answers or can begin them in time, and of all.

        Where more come than can be served, late ones would otherwise have all these places, and make all that come
        after them late, too.
        """
        if self._num_oldest % 2:
            return min(sequences, key=attrgetter("arrival"))
        urgency = {kind: self._urgency(kind, now) for kind in _CLASSES}

        def rank(sequence: Sequence) -> tuple[bool, int]:
            _, is_late = urgency[sequence.request.service_class](sequence)
            return sequence.progress.first_at is None and is_late, sequence.arrival

        return min(sequences, key=rank)

    @property
    def _is_turn_of_oldest(self) -> bool:
        if self._num_entered % _OLDEST_EVERY < _OLDEST_EVERY - 1:
            return False
        # Answers of batch may be many times as long as others, so that those that are kept would take most places.
        return sum(one.request_id in self._kept for one in self.running) * _KEPT_PLACES < self._config.max_running

    def _blocks_at_hand(self, sequence: Sequence) -> int:
        """A paused one has its own; interactive ones take those of batch sequences, which are preempted first."""
        holders = [sequence]
        if not _is_batch(sequence):
            holders = self.paused + list(filter(self._may_pause, self.running))
        return sum(-(-one.target.num_computed // self._block_size) for one in holders)

    def _order(self, kind: ServiceClass, now: float) -> TurnOrder:
        order = self._orders.get(kind)
        if order is None:
            order = TurnOrder(self._lacking_place(kind), self._urgency(kind, now), self._turns[kind])
            self._orders[kind] = order
        return order

    def _keep(self, oldest: Sequence) -> None:
        self._kept.add(oldest.request_id)
        self._num_oldest += 1

    def _enter(self, sequence: Sequence) -> None:
        self._num_entered += 1
        if sequence is self._to_keep:
            self._keep(sequence)
        if sequence in self.paused:
            self.paused.remove(sequence)
        else:
            self._take_out(sequence)
        for order in self._orders.values():
            order.leave(sequence)
        if len(self.running) >= self._config.max_running:
            victim = next(one for one in reversed(self.running) if self._may_pause(one))
            self.running.remove(victim)
            self.paused.append(victim)
        insort(self.running, sequence, key=attrgetter("arrival"))
        self._charge(sequence)

    def _charge(self, sequence: Sequence) -> None:
        """What it will probably take, when it first runs: its tenant's next one waits for its turn until then."""
        if sequence.request_id in self._charged:
            return
        request = sequence.request
        answer = min(float(sequence.num_left), self._answers[request.service_class].length)
        self._charged[sequence.request_id] = tokens = self._prompt_rows(sequence) + answer
        self._turns[request.service_class].charge(request.tenant, request.tenant_weight, tokens)

    # Rounds

    def round_limit_s(self, now: float) -> float:
        streams = [sequence for sequence in self.running if not _is_batch(sequence)]
        return round_limit_s(streams, self._objectives["interactive"].tpot_s, now)

    def taking_part(self, limit_s: float) -> list[Sequence]:
        left = most_sequences(self._step_times, limit_s, len(self.running)) if self.running else 0
        left -= sum(not self._may_pause(sequence) for sequence in self.running)
        chosen = []
        for sequence in self.running:
            if self._may_pause(sequence):
                left -= 1
                if left < 0:
                    continue
            chosen.append(sequence)
        return chosen

    def gives_way(self, sequence: Sequence) -> bool:
        return self._may_pause(sequence)

    # Ends

    def _rate_of(self, sequence: Sequence) -> FinishRate:
        return self._rates[sequence.request.service_class]

    def _leave(self, sequence: Sequence) -> None:
        (self.paused if sequence in self.paused else self.running).remove(sequence)
        self._answers[sequence.request.service_class].add(sequence)

    def remove(self, sequence: Sequence, now: float | None) -> None:
        super().remove(sequence, now)
        request = sequence.request
        self._kept.discard(request.request_id)
        charged = self._charged.pop(request.request_id, None)
        if charged is not None:
            spent = sequence.num_tokens - sequence.target.num_cached
            self._turns[request.service_class].charge(request.tenant, request.tenant_weight, spent - charged)
        if not self._charged and not self.waiting:
            for turns in self._turns.values():
                turns.clear()

    def preempt_youngest(self) -> Sequence:
        """The youngest batch sequence, if there is one that may be paused; those that are paused first."""
        candidates = self.paused or [one for one in self.running if self._may_pause(one)] or self.running
        victim = max(candidates, key=attrgetter("arrival"))
        (self.paused if victim in self.paused else self.running).remove(victim)
        self._put_first(victim)
        return victim


def _is_batch(sequence: Sequence) -> bool:
    return sequence.request.service_class == "batch"
