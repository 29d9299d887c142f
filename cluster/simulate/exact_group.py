"""One router with its target group, round by round: the real router core on simulated time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from actors.errors import Overloaded, RouterLost
from actors.messages import DraftResult, GenerationRequest, VerifyBatch, VerifyResult
from actors.workers.demand import DraftDemand, TargetDemand
from cluster.router.core import RouterCore
from cluster.router.round import RequestFailed, Round, RouterEvent
from cluster.routing.announcer import Announcer
from cluster.routing.prefix_blocks import prefix_blocks
from cluster.simulate.bandwidth import Bandwidth
from cluster.simulate.connection import NOTICED_S, Connection
from cluster.simulate.draft_workers import DraftPool
from cluster.simulate.events import Action, Events
from cluster.simulate.news import ANNOUNCE_PERIOD_S
from cluster.simulate.options import CostOptions
from cluster.simulate.rounds import Deliver, Group, RoundCounts
from cluster.simulate.shared_log import RouterCache
from cluster.simulate.target import ScriptedTarget

_IDLE_POLL_S = 0.05  # as of the router's driver
_LEFT_BEHIND_S = 2.0  # until a target frees the sequences of a router that is gone


@dataclass(slots=True)
class _Stream:
    request: GenerationRequest
    deliver: Deliver
    answer: list[int] = field(default_factory=list)


class ExactGroup:
    """`on_change` is called whenever it becomes ready or no longer is."""

    def __init__(
        self,
        name: str,
        zone: int,
        events: Events,
        target: ScriptedTarget,
        make_core: Callable[[], tuple[RouterCore, RouterCache | None]],
        *,
        draft_pool: DraftPool,
        draft_deadline_s: float,
        costs: CostOptions,
        on_change: Callable[[Group], object] = lambda group: None,
        make_announcer: Callable[[], Announcer],
    ) -> None:
        self.name = name
        self.zone = zone
        self.counts = RoundCounts()
        self.by_running: dict[int, RoundCounts] = {}  # by emitting sequences
        self.draft_prompt_s = 0.0  # of draft workers, for prompts
        self._events = events
        self._target = target
        self._make_core = make_core
        self._pool = draft_pool
        self._draft_deadline_s = draft_deadline_s
        self._costs = costs
        self._on_change = on_change
        self._has_target = self._is_there = True
        self._is_draining = False
        self._streams: dict[str, _Stream] = {}
        self._make_announcer = make_announcer
        self._announcer = make_announcer()
        self._round: Round | None = None
        self._round_draft_s = 0.0  # of draft workers, without prompts
        self._is_awake = False  # an event of this router is planned that goes on with its rounds
        self._turn = 0  # events planned in another turn are void
        self._target_link, self._draft_link = Connection(events), Connection(events)
        self._outward, self._inward = (Bandwidth(events, costs.link_bytes_per_s) for _ in range(2))
        self._late_s = 0.0  # time that requests have taken from the rounds
        self.core, self._cache = make_core()
        events.every(ANNOUNCE_PERIOD_S, self._announce)

    def begin_counting(self) -> None:
        """Forget what rounds have been counted by their sequences, and drafts of prompts."""
        self.by_running.clear()
        self.draft_prompt_s = 0.0

    @property
    def is_ready(self) -> bool:
        return self._is_there and self._reaches_target and not self._is_draining

    @property
    def _reaches_target(self) -> bool:
        """As far as the router has noticed."""
        return self._has_target and not self._target_link.is_broken

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def accept(self, request: GenerationRequest, deliver: Deliver) -> None:
        if not self._is_there:
            raise RouterLost("the router is gone")
        if self._is_draining:
            raise RouterLost("the router is draining")
        try:
            self.core.add(request, self._events.now)
        except Overloaded as error:
            if request.asks_another:
                error.router_id = self.name
            raise
        self._streams[request.request_id] = _Stream(request, deliver)
        self._late_s += self._costs.router_request_s
        self._wake()

    def cancel(self, request_id: str) -> None:
        if self._is_there and self.core.cancel(request_id):
            self._streams.pop(request_id, None)
            self._wake()

    def target_demand(self) -> TargetDemand | None:
        return self.core.target_demand(self._events.now) if self._is_there and self._reaches_target else None

    def draft_demand(self) -> DraftDemand:
        return next(iter(self.core.draft_scaling.values())).demand(self._events.now)

    def set_draft_workers(self) -> None:
        self.core.set_draft_workers(list(self._pool.workers))
        self._wake()

    # Faults

    def lose_target(self) -> None:
        if self._has_target:
            self._has_target = False
            if self._is_there:
                self._void_round()
                self._wake()
            self._on_change(self)

    def bring_target(self) -> None:
        if not self._has_target:
            self._target.restart()
            self._announcer.forget()
            self._has_target = True
            self.core.target_lost()
            self._wake()
            self._on_change(self)

    def lose_router(self) -> None:
        """Its streams break."""
        if not self._is_there:
            return
        self._is_there = False
        self._void_round()
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.deliver(RequestFailed(request_id, RouterLost("the router is gone")))
        if self._cache is not None:
            self._cache.close()
        self._events.after(_LEFT_BEHIND_S, self._target.forget_all)
        self._on_change(self)

    def bring_router(self) -> None:
        """It starts anew and has learnt nothing."""
        if not self._is_there:
            self._is_there = True
            self.core, self._cache = self._make_core()
            self._announcer = self._make_announcer()
            self.set_draft_workers()
            self._on_change(self)

    def cut(self, link: Literal["target_link", "draft_link", "store_link"], seconds: float) -> None:
        """The router cannot reach its target, the draft workers or the store, but others can."""
        if link == "store_link":
            if self._cache is not None:
                self._cache.cut(seconds)
        elif link == "draft_link":
            self._draft_link.cut(seconds)
        else:
            self._target_link.cut(seconds)
            for delay_s in (NOTICED_S, seconds):
                self._events.after(delay_s, self._target_link_changed)

    def _target_link_changed(self) -> None:
        self._wake()
        self._on_change(self)

    def drain(self) -> None:
        self._is_draining = True
        self._on_change(self)

    def _void_round(self) -> None:
        """What is under way comes to nothing."""
        self._turn += 1
        self._is_awake = False
        if self._round is not None:
            self.core.abandon_round(self._round)
            self._round = None

    # Rounds, as `run_round` has them

    def _wake(self) -> None:
        if not self._is_awake and self._is_there:
            self._is_awake = True
            self._events.after(0.0, self._begin, self._turn)

    def _sleep(self, seconds: float) -> None:
        self._is_awake = True
        self._events.after(seconds, self._begin, self._turn)

    def _begin(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._is_awake = False
        if not self._reaches_target:
            self._deliver(self.core.end_overdue(self._events.now))
            if self._streams:
                self._sleep(_IDLE_POLL_S)
            return
        began = self._events.now
        round, events = self.core.plan_round(began)
        self._deliver(events)
        if round is None:
            if self.core.has_work:
                self._sleep(_IDLE_POLL_S)
            return
        self._is_awake, self._round = True, round
        deadline = began + self._draft_deadline_s
        answers = self._ask_workers(round, began, deadline)
        self._note_drafting(round, answers)
        self.core.draft_locally(round)
        ready_at = began + self._own_seconds(round)
        results: dict[str, DraftResult | None] = {}
        for worker_id in round.asked.awaited:
            # A worker that is gone has no link: it is not waited for.
            comes_at, result = answers.get(worker_id, (began, None))
            results[worker_id] = result if comes_at <= deadline else None
            ready_at = max(ready_at, min(comes_at, deadline))
        self._events.at(ready_at, self._verify, self._turn, round, results, began)

    def _note_drafting(self, round: Round, answers: Mapping[str, tuple[float, DraftResult | None]]) -> None:
        self._round_draft_s = 0.0
        for worker_id, (_, result) in answers.items():
            if result is not None:
                prompt_s = self._pool.prompt_seconds(round.asked.batches[worker_id], result)
                self._round_draft_s += result.elapsed_s - prompt_s
                self.draft_prompt_s += prompt_s

    def _ask_workers(self, round: Round, began: float, deadline: float) -> dict[str, tuple[float, DraftResult | None]]:
        """By worker, those with a link: when its answer comes, and the answer, None if there is none."""
        batches = round.asked.batches
        if self._draft_link.is_cut:
            return {} if self._draft_link.is_broken else dict.fromkeys(batches, (deadline, None))
        half_s = self._costs.link_s / 2
        answers: dict[str, tuple[float, DraftResult | None]] = {}
        for worker_id, batch in batches.items():
            arrives = self._outward.message_passed_at(batch, began) + half_s
            answer = self._pool.draft(self.name, worker_id, batch, arrives)
            if answer is not None:
                answered_at, result = answer
                answers[worker_id] = self._inward.message_passed_at(result, answered_at + half_s), result
        return answers

    def _own_seconds(self, round: Round) -> float:
        late_s, self._late_s = self._late_s, 0.0
        return late_s + self._costs.router_round_s + self._costs.router_sequence_s * len(round.entries)

    def _verify(self, turn: int, round: Round, results: dict[str, DraftResult | None], began: float) -> None:
        if turn != self._turn:
            return
        if self._draft_link.is_cut:  # their answers are lost
            results = dict.fromkeys(results)
        batch = self.core.assemble(round, results)
        round.assembled_at = self._events.now
        sent_s = self._outward.message_passed_at(batch, self._events.now) - self._events.now
        if sent_s:
            self._events.after(sent_s, self._pass, self._compute, turn, round, batch, began)
        else:
            self._pass(self._compute, turn, round, batch, began)

    def _compute(self, turn: int, round: Round, batch: VerifyBatch, began: float) -> None:
        """The batch is at the target, which may have changed meanwhile."""
        if turn != self._turn:
            return
        result = self._target.verify(batch)
        answered_at = self._events.now + (self._costs.link_s + result.elapsed_s)
        comes_at = self._inward.message_passed_at(result, answered_at)
        self._events.at(comes_at, self._pass, self._commit, turn, round, result, began)

    def _pass(self, action: Action, turn: int, *args: object) -> None:
        """Between router and target, either way. Where the link breaks, the round is given up."""
        passes_at = self._target_link.passes_at
        if passes_at is None:
            self._events.after(NOTICED_S, self._give_up, turn)
        elif passes_at > self._events.now:
            self._events.at(passes_at, action, turn, *args)
        else:
            action(turn, *args)

    def _give_up(self, turn: int) -> None:
        if turn == self._turn:
            self._void_round()
            self._sleep(_IDLE_POLL_S)

    def _commit(self, turn: int, round: Round, result: VerifyResult, began: float) -> None:
        if turn != self._turn:
            return
        self._round = None
        events = self.core.commit(round, result, self._events.now)
        self._count(round, events, result.rows, self._events.now - began)
        self._deliver(events)
        is_starved = bool(result.starved_seq_ids) and not result.verdicts
        self._sleep(_IDLE_POLL_S if is_starved else 0.0)

    def _count(self, round: Round, events: list[RouterEvent], rows: int, seconds: float) -> None:
        tokens = sum(len(event.token_ids) for event in events if not isinstance(event, RequestFailed))
        emitting = round.size.num_emitting
        counts = RoundCounts(1, tokens, emitting, rows, seconds, self._round_draft_s)
        self.counts.add(counts)
        if 0 < emitting == len(round.entries) == round.size.num_rows:  # it only decodes
            self.by_running.setdefault(emitting, RoundCounts()).add(counts)

    def _deliver(self, events: list[RouterEvent]) -> None:
        for event in events:
            is_last = isinstance(event, RequestFailed) or event.finish_reason is not None
            stream = self._streams.pop(event.request_id, None) if is_last else self._streams.get(event.request_id)
            if stream is None:
                continue
            if not isinstance(event, RequestFailed):
                is_first = not stream.answer
                stream.answer += event.token_ids
                if is_first or is_last:
                    self._note_computed(stream)
            stream.deliver(event)

    # News for gateways

    def _note_computed(self, stream: _Stream) -> None:
        request = stream.request
        tokens = np.concatenate([request.prompt_token_ids, np.array(stream.answer, np.int32)])
        blocks = prefix_blocks(tokens, request.prefix_namespace or request.namespace)
        self._announcer.use(blocks, request.namespace)

    def _announce(self) -> None:
        if self._is_there:
            self._announcer.announce(self.core.load() if self.is_ready else None, self.core.prefix_cache_tokens)
