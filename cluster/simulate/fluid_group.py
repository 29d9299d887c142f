"""A router with its target group whose rounds are not computed one by one: between arrivals and ends, tokens flow at
the rate that exact rounds have shown. Admission and the shares of prompt rows are the router's own.

Rounds with prompts are single events; rounds that only decode are not.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.errors import Overloaded, RouterLost
from actors.messages import GenerationRequest, SpeculationStats, TokenChunk
from actors.workers.demand import DraftDemand, TargetDemand
from cluster.config import RouterConfig
from cluster.router.round import RequestFailed
from cluster.router.scheduler import Scheduler, share_prompt_rows
from cluster.routing.announcer import Announcer
from cluster.routing.prefix_blocks import BLOCK_TOKENS
from cluster.simulate.draft_workers import DraftPool
from cluster.simulate.events import Events
from cluster.simulate.fluid_cache import FluidCache
from cluster.simulate.news import ANNOUNCE_PERIOD_S
from cluster.simulate.prefix_memory import PrefixMemory
from cluster.simulate.rounds import Deliver, Group
from cluster.simulate.scripts import Prefixes, Scripts
from cluster.simulate.service_rates import ServiceRates

_BLOCK = 16  # tokens of a KV block
_LOTS = 1 << 40
_USUAL_ROUNDS = 64.0  # of an answer, before any has ended
_SAME_NEWS_S = 1.75  # between news that say the same: gateways give a router up after 2 s without any
_NEW_SHARE = 0.01  # of the last answer in the mean


@dataclass(slots=True)
class _Progress:
    arrived_at: float
    started_at: float | None = None


@dataclass(slots=True, eq=False)
class _Sequence:
    """What the scheduler needs of a sequence, and where it is."""

    request: GenerationRequest
    deliver: Deliver
    arrival: int
    progress: _Progress
    request_id: str
    num_tokens: int
    rows_left: int = -1  # of its prompt; -1: it has not begun
    num_cached: int = 0
    end: float = 0.0  # the group's tokens at its end, while it decodes
    left: float | None = None  # until then, of one that has begun and waits for its target
    is_over: bool = False
    keys: Prefixes = ()
    blocks: Sequence[int] = ()  # of prompt and answer


class FluidGroup:
    def __init__(
        self,
        name: str,
        zone: int,
        events: Events,
        scripts: Scripts,
        config: RouterConfig,
        rates: ServiceRates,
        kv_tokens: int,
        on_change: Callable[[Group], object],
        make_announcer: Callable[[], Announcer] | None = None,
        *,
        draft_pool: DraftPool,
        cache: FluidCache | None,
    ) -> None:
        """make_announcer: None: gateways hear nothing of it. draft_pool: its time is counted, nothing else."""
        self.name = name
        self.zone = zone
        self._events = events
        self._scripts = scripts
        self._config = config
        self._rates = rates
        self._kv_tokens = kv_tokens
        self._on_change = on_change
        self._draft_pool = draft_pool
        self._cache = cache
        self._has_target = self._is_there = True
        self._is_draining = False
        self._turn = 0  # events planned in another turn are void
        self._num_arrived = 0
        self._answer_rounds = _USUAL_ROUNDS
        self._is_news_planned = False
        self._told_at = events.now
        self._make_announcer = make_announcer
        self._begin_anew()
        if make_announcer is not None:
            self._plan_news()
            self._repeat_later()

    def _begin_anew(self) -> None:
        self._scheduler = Scheduler(self._config, _BLOCK)
        self._open: dict[str, _Sequence] = {}
        self._num_answers = 0  # since its start
        self._decoding: list[tuple[float, int, _Sequence]] = []  # heap by the group's tokens at their end
        self._num_decoding = 0
        self._tokens = 0.0  # that each decoding sequence has emitted since the start
        self._at = self._events.now
        self._rounds_s = 0.0  # time of all rounds in which sequences decoded
        self._prefill_until: float | None = None  # end of the present round with prompts
        self._prefill_s = self._prefill_rounds = 0.0  # until then, the rest of a round before it included
        self._shares: list[tuple[_Sequence, int]] = []  # its prompt rows
        self._prefixes = PrefixMemory(self._kv_tokens)
        self._announcer = None if self._make_announcer is None else self._make_announcer()

    def _plan_news(self) -> None:
        """Announce at the next of the times at which a router does; most of the time a group has nothing to say."""
        if not self._is_news_planned and self._make_announcer is not None:
            self._is_news_planned = True
            self._events.at((self._events.now // ANNOUNCE_PERIOD_S + 1.0) * ANNOUNCE_PERIOD_S, self._announce)

    def _repeat_later(self) -> None:
        """When news that say the same are due, if no others come before."""
        due = self._told_at + _SAME_NEWS_S
        self._events.at(due if due > self._events.now else self._events.now + _SAME_NEWS_S, self._repeat_news)

    def _repeat_news(self) -> None:
        if not self._is_news_planned and self._events.now >= self._told_at + _SAME_NEWS_S:
            self._announce()
        self._repeat_later()

    def _announce(self) -> None:
        self._is_news_planned = False
        if self._announcer is None or not self._is_there:
            return
        self._told_at = self._events.now
        load = None
        if self.is_ready:
            sequences = self._open.values()
            backlog = sum(one.num_tokens if one.rows_left < 0 else one.rows_left for one in sequences)
            running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
            places, answers = self._config.max_running, self._num_answers
            load = self._rates.load(running, waiting, places, backlog, self._answer_rounds, answers)
        self._announcer.announce(load, self._kv_tokens)

    def _note_computed(self, sequence: _Sequence, num_tokens: int) -> None:
        """num_tokens: of the answer so far."""
        if self._announcer is not None:
            length = sequence.num_tokens + num_tokens
            self._announcer.use(sequence.blocks[: length // BLOCK_TOKENS], sequence.request.namespace)

    @property
    def is_ready(self) -> bool:
        return self._is_there and self._has_target and not self._is_draining

    @property
    def num_open(self) -> int:
        return len(self._open)

    def accept(self, request: GenerationRequest, deliver: Deliver) -> None:
        if not self._is_there or self._is_draining:
            raise RouterLost("the router is gone")
        now = self._events.now
        count = len(request.prompt_token_ids)
        sequence = _Sequence(request, deliver, self._num_arrived, _Progress(now), request.request_id, count)
        self._num_arrived += 1
        try:
            self._scheduler.enqueue(self._as_sequence(sequence), now)
        except Overloaded as error:
            if request.asks_another:
                error.router_id = self.name
            raise
        self._open[request.request_id] = sequence
        if self._cache is not None:
            self._cache.use(request)
        self._plan_news()
        if self._prefill_until is None and self._has_target:
            self._advance()
            self._plan(is_within_round=True)

    @staticmethod
    def _as_sequence(sequence: _Sequence) -> Any:
        return sequence

    def cancel(self, request_id: str) -> None:
        sequence = self._open.get(request_id)
        if sequence is not None:
            self._advance()
            self._leave(sequence, self._num_emitted(sequence))
            self._plan()

    def target_demand(self) -> TargetDemand | None:
        if not (self._is_there and self._has_target):
            return None
        used_share = len(self._scheduler.running) / self._config.max_running
        return TargetDemand(self._scheduler.longest_wait_s(self._events.now), used_share)

    def draft_demand(self) -> DraftDemand:
        return DraftDemand()

    # Faults: a target that is gone starts all its sequences anew, a router breaks its streams.

    def lose_target(self) -> None:
        self._advance()
        self._has_target = False
        self._turn += 1
        self._prefill_until = None
        for _, _, sequence in self._decoding:
            sequence.left = sequence.end - self._tokens
        self._decoding.clear()
        self._num_decoding = 0
        running: list[Any] = self._scheduler.running
        for sequence in running:
            sequence.rows_left = -1
        self._plan_news()
        self._on_change(self)

    def bring_target(self) -> None:
        self._has_target = True
        self._prefixes = PrefixMemory(self._kv_tokens)
        if self._announcer is not None:
            self._announcer.forget()
        self._at = self._events.now
        self._plan()
        self._on_change(self)

    def lose_router(self) -> None:
        self._is_there = False
        self._turn += 1
        for request_id, sequence in self._open.items():
            sequence.deliver(RequestFailed(request_id, RouterLost("the router is gone")))
        if self._cache is not None:
            self._cache.close()
        self._begin_anew()
        self._on_change(self)

    def bring_router(self) -> None:
        self._is_there = True
        self._plan_news()
        self._on_change(self)

    def drain(self) -> None:
        self._is_draining = True
        self._plan_news()
        self._on_change(self)

    # Time

    def _advance(self) -> None:
        """Let the tokens flow until now."""
        now = self._events.now
        if self._num_decoding and now > self._at:
            seconds, tokens, _, _ = self._rates.of(self._num_decoding)
            if self._prefill_until is not None:
                seconds = self._prefill_s / self._prefill_rounds
            rounds = (now - self._at) / seconds
            self._tokens += tokens * rounds
            self._rounds_s += now - self._at
            self._draft_pool.busy_s += rounds * self._rates.drafting.round_s(self._num_decoding)
        self._at = now

    def _plan(self, is_within_round: bool = False) -> None:
        """Begin a round with prompts if there are any, and plan the next event. is_within_round: a round that decodes
        has begun, at half of which we are on average."""
        self._turn += 1
        self._plan_news()
        if not self._has_target:
            return
        now = self._events.now
        if self._prefill_until is None:
            self._begin_prompts(is_within_round)
        if self._prefill_until is not None:
            self._events.at(self._prefill_until, self._end_prompts, self._turn)
        while self._decoding and self._decoding[0][2].is_over:
            heapq.heappop(self._decoding)
        if self._decoding and self._prefill_until is None:
            seconds, tokens, _, _ = self._rates.of(self._num_decoding)
            left = self._decoding[0][0] - self._tokens
            self._events.at(now + max(0.0, left) * seconds / tokens, self._end_first, self._turn)

    def _begin_prompts(self, is_within_round: bool) -> None:
        now, scheduler = self._events.now, self._scheduler
        scheduler.admit(_LOTS, now)
        running: list[Any] = scheduler.running
        for sequence in running:
            if sequence.rows_left < 0:
                self._find_prefix(sequence)
        prompts = [sequence for sequence in running if sequence.rows_left > 0]
        if not prompts:
            return
        _, _, _, budget = self._rates.of(self._num_decoding)
        shares = share_prompt_rows([sequence.rows_left for sequence in prompts], budget)
        self._shares = list(zip(prompts, shares, strict=True))
        begun = 0.5 if is_within_round else 0.0
        waits_s = begun * self._rates.of(self._num_decoding)[0]
        self._prefill_s = waits_s + self._rates.with_prompts(self._num_decoding, sum(shares))
        self._prefill_rounds = 1.0 + begun
        self._prefill_until = now + self._prefill_s

    def _find_prefix(self, sequence: _Sequence) -> None:
        script = self._scripts[sequence.request.sampling.seed]
        sequence.keys, sequence.blocks = script.prefixes, script.blocks
        length = sequence.num_tokens if sequence.left is None else sequence.num_tokens + self._num_emitted(sequence)
        cached = self._prefixes.find(sequence.keys, length - 1) // _BLOCK * _BLOCK
        sequence.rows_left = length - cached
        if sequence.left is None:
            sequence.num_cached = cached
            sequence.progress.started_at = self._events.now

    def _end_prompts(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        self._prefill_until = None
        self._end_due()
        for sequence, rows in self._shares:
            sequence.rows_left -= rows
            if not sequence.rows_left and not sequence.is_over:
                self._begin_decoding(sequence)
        self._plan()

    def _begin_decoding(self, sequence: _Sequence) -> None:
        self._prefixes.add(sequence.keys, sequence.num_tokens)
        if sequence.left is not None:
            self._decode(sequence, sequence.left)
            return
        self._draft_pool.busy_s += sequence.num_tokens * self._rates.drafting.prompt_token_s
        if self._cache is not None:
            self._cache.begin(sequence.request, self._rounds_s)
        if sequence.request.max_new_tokens == 1:
            self._finish(sequence, 1)
            return
        self._send(sequence, 1, is_last=False)
        self._decode(
            sequence, (sequence.request.max_new_tokens - 1) / self._rates.speed(sequence.request.sampling.seed)
        )

    def _decode(self, sequence: _Sequence, left: float) -> None:
        """left: the group's tokens until its end."""
        self._num_decoding += 1
        sequence.end, sequence.left = self._tokens + left, None
        heapq.heappush(self._decoding, (sequence.end, sequence.arrival, sequence))

    def _end_first(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        self._tokens = max(self._tokens, self._decoding[0][0])
        self._end_due()
        self._plan()

    def _end_due(self) -> None:
        """End what has all its tokens."""
        while self._decoding and (self._decoding[0][0] <= self._tokens + 1e-9 or self._decoding[0][2].is_over):
            _, _, sequence = heapq.heappop(self._decoding)
            if not sequence.is_over:
                self._finish(sequence, sequence.request.max_new_tokens - 1)

    def _finish(self, sequence: _Sequence, num_tokens: int) -> None:
        length = sequence.num_tokens + sequence.request.max_new_tokens
        self._prefixes.add(sequence.keys, length)
        self._leave(sequence, sequence.request.max_new_tokens)
        self._send(sequence, num_tokens, is_last=True)

    def _num_emitted(self, sequence: _Sequence) -> int:
        """Tokens so far of a sequence that has not ended."""
        left = sequence.end - self._tokens if sequence.left is None else sequence.left
        num_left = round(left * self._rates.speed(sequence.request.sampling.seed))
        return max(1, sequence.request.max_new_tokens - num_left)

    def _leave(self, sequence: _Sequence, num_emitted: int) -> None:
        del self._open[sequence.request_id]
        if self._cache is not None and (not sequence.rows_left or sequence.left is not None):
            round_s = self._rates.of(self._num_decoding)[0]
            self._cache.end(sequence.request, self._rounds_s, round_s, num_emitted)
        is_decoding = sequence.rows_left == 0 and sequence.request.max_new_tokens > 1
        self._num_decoding -= is_decoding
        sequence.is_over = True
        self._scheduler.remove(self._as_sequence(sequence), self._events.now)

    def _send(self, sequence: _Sequence, num_tokens: int, is_last: bool) -> None:
        answer = self._scripts[sequence.request.sampling.seed].answer
        done = len(answer) - sequence.request.max_new_tokens
        first = done if num_tokens == 1 and not is_last else len(answer) - num_tokens
        stats = None
        if is_last:
            speed = self._rates.speed(sequence.request.sampling.seed)
            rounds = 1 + round(num_tokens / speed / self._rates.of(max(1, self._num_decoding))[1])
            stats = SpeculationStats(rounds=rounds)
            self._num_answers += 1
            self._answer_rounds += _NEW_SHARE * (rounds - self._answer_rounds)
        self._note_computed(sequence, first + num_tokens - done)
        sequence.deliver(
            TokenChunk(
                request_id=sequence.request_id,
                index=int(is_last),
                token_ids=tuple(answer[first : first + num_tokens].tolist()),
                finish_reason="length" if is_last else None,
                num_cached_tokens=sequence.num_cached,
                stats=stats,
            )
        )
