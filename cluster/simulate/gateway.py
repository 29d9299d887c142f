"""Clients and gateways in simulated time: limits, routing, streams that go on elsewhere, refusals and their retries."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec
import numpy as np

from actors.errors import Overloaded, PacelineError, RouterLost, Unavailable
from actors.messages import GenerationRequest, SamplingParams, TokenChunk
from cluster.gateway.resume import UnbrokenStream
from cluster.router.round import RequestFailed, RouterEvent
from cluster.simulate.events import Events, Server
from cluster.simulate.options import CostOptions
from cluster.simulate.records import Record
from cluster.simulate.rounds import Group
from cluster.simulate.router_choice import RouterChoice
from cluster.simulate.scripts import Script, Scripts
from cluster.simulate.traffic import Turn
from cluster.tenants.limiter import TenantLimiter
from cluster.tenants.scope import Scope

_RETRY_S = 1.0  # of a client whose request was refused without a Retry-After
_FULL = "the router's queue is full"


@dataclass(frozen=True, slots=True)
class SimulatedTenant:
    id: str
    scope: Scope
    weight: float = 1.0


class Gateway:
    """One gateway process."""

    def __init__(
        self,
        events: Events,
        costs: CostOptions,
        choice: RouterChoice,
        limiter_of: Callable[[int], TenantLimiter],
    ) -> None:
        """limiter_of: by tenant, this gateway's own."""
        self.events = events
        self.costs = costs
        self.server = Server(events)
        self.choice = choice
        self.limiter_of = limiter_of


class ClientCall:
    """A client's request from its first sending to its end, which comes exactly once: `on_end` is told of it."""

    def __init__(
        self,
        turn: Turn,
        tenant: SimulatedTenant,
        gateway: Gateway,
        scripts: Scripts,
        *,
        timeout_s: float,
        retries: int,
        on_end: Callable[[ClientCall], object],
    ) -> None:
        self.turn = turn
        self.record = Record(
            tenant=turn.conversation.tenant,
            turn=turn.number,
            num_prompt=len(turn.prompt),
            arrived=0.0,
            service_class=turn.conversation.service_class,
        )
        self.received: list[int] = []
        self._gateway = gateway
        self._events = gateway.events
        self._scripts = scripts
        self._retries = retries
        self._on_end = on_end
        self._seed = scripts.add(Script(turn.answer, turn.conversation.tenant, turn.prefixes))
        scope = tenant.scope
        self._request = GenerationRequest(
            request_id=f"request-{self._seed}",
            prompt_token_ids=turn.prompt,
            sampling=SamplingParams(self._seed, temperature=0.0),
            max_new_tokens=len(turn.answer),
            tenant=tenant.id,
            tenant_weight=tenant.weight,
            service_class=turn.conversation.service_class,
            namespace=scope.namespace,
            prefix_namespace=scope.prefix_namespace,
            readable=scope.readable,
            cache=scope.cache,
            promotes=scope.promotes,
            timeout_s=timeout_s,
            wants_stats=False,
        )
        self._stream: UnbrokenStream | None = None
        self._group: Group | None = None
        self._asked = ""  # request id under which the router that is asked now knows it
        self._places: AbstractContextManager[None] | None = None
        self._is_over = False

    @property
    def name(self) -> str:
        return self._request.request_id

    def begin(self) -> None:
        """The client sends it now."""
        self.record.arrived = self._events.now
        self._send()

    def _send(self) -> None:
        costs = self._gateway.costs
        self._events.after(costs.hop_s, self._gateway.server.run, costs.gateway_request_s, self._enter)

    def _enter(self) -> None:
        """The gateway has read it."""
        limiter = self._gateway.limiter_of(self.turn.conversation.tenant)
        try:
            limiter.take_request()
            limiter.check_tokens(len(self.turn.prompt))
            places = limiter.admitted(len(self.turn.prompt), 1)
            places.__enter__()
        except PacelineError as error:
            self._refused(error)
            return
        self._places = places
        self._stream = UnbrokenStream(self._request, self._events.now)
        self._route()

    def _route(self) -> None:
        if self._is_over:
            return
        assert self._stream is not None
        rest, choice = self._stream.rest, self._gateway.choice
        rest = msgspec.structs.replace(rest, asks_another=choice.has_others and rest.refusal is None)
        group = self._group = choice.choose(rest, self._events.now)
        self._asked = rest.request_id
        if group is None:
            self._lost(self._asked, Overloaded(_FULL, _RETRY_S))
        else:
            self._events.after(self._gateway.costs.hop_s, self._accept, group, rest)

    def _accept(self, group: Group, rest: GenerationRequest) -> None:
        """The request has come to the router."""
        if self._is_over:
            return
        asked = rest.request_id
        try:
            group.accept(rest, lambda event: self._told(asked, event))
        except PacelineError as error:
            self._events.after(self._gateway.costs.hop_s, self._lost, asked, error)
            return
        self._gateway.choice.accepted(group, self._events.now)

    def _told(self, asked: str, event: RouterEvent) -> None:
        """The router has committed something: it reaches the gateway, and is read there."""
        self._events.after(self._gateway.costs.hop_s, self._read, asked, event)

    def _read(self, asked: str, event: RouterEvent) -> None:
        if isinstance(event, RequestFailed):
            self._lost(asked, event.error)
        else:
            self._gateway.server.run(self._gateway.costs.gateway_chunk_s, self._take, asked, event)

    def _take(self, asked: str, chunk: TokenChunk) -> None:
        if self._is_over or asked != self._asked:
            return
        assert self._stream is not None
        assert self._group is not None
        is_first = chunk.index == 0
        chunk = self._stream.take(chunk)
        if is_first and chunk.index == 0:
            self.record.num_cached = chunk.num_cached_tokens
        if chunk.stats is not None:
            self.record.rounds += chunk.stats.rounds
        self._gateway.limiter_of(self.record.tenant).spend(len(chunk.token_ids))
        self._show(chunk)
        if chunk.finish_reason is not None:
            self._gateway.choice.ended(self._group, self._events.now)

    def _show(self, chunk: TokenChunk) -> None:
        """The client sees a chunk, a hop later than now."""
        now = self._events.now + self._gateway.costs.hop_s
        self.received += chunk.token_ids
        if chunk.token_ids:
            self.record.first_at = self.record.first_at or now
            self.record.ended_at = now
        if chunk.finish_reason is not None:
            self._end("answered" if chunk.finish_reason == "length" else chunk.finish_reason, now)
        elif self.turn.cancel_after is not None and len(self.received) > self.turn.cancel_after:
            if self._group is not None:
                self._group.cancel(self._asked)
                self._gateway.choice.ended(self._group, self._events.now)
            self._end("cancelled", now)

    def _lost(self, asked: str, error: PacelineError) -> None:
        """The router has refused or broken the stream."""
        if self._is_over or asked != self._asked:
            return
        assert self._stream is not None
        if self._group is not None:
            self._gateway.choice.ended(self._group, self._events.now)
        try:
            if not isinstance(error, Unavailable | Overloaded):
                raise error
            pause_s = self._stream.pause_after(error)
        except PacelineError as final:
            self._refused(final)
            return
        self.record.resumed += isinstance(error, RouterLost)
        if (last := self._stream.last_chunk()) is not None:
            self._show(last)
            return
        self._events.after(self._stream.within_deadline(pause_s, self._events.now), self._ask_again)

    def _ask_again(self) -> None:
        assert self._stream is not None
        self._stream.ask_again(self._events.now)
        self._route()

    def _refused(self, error: PacelineError) -> None:
        """The client gets the error, and may send the request again."""
        self._leave_places()
        if isinstance(error, Overloaded):
            self.record.refusals += 1
            if self.record.refusals <= self._retries:
                self._events.after(error.retry_after_s + self._gateway.costs.hop_s, self._send)
                return
        self._end(type(error).__name__, self._events.now + self._gateway.costs.hop_s)

    def _leave_places(self) -> None:
        if self._places is not None:
            self._places.__exit__(None, None, None)
            self._places = None

    def _end(self, outcome: str, now: float) -> None:
        assert not self._is_over
        self._is_over = True
        self._leave_places()
        self.record.outcome = outcome
        self.record.num_tokens = len(self.received)
        self.record.ended_at = self.record.ended_at or now
        self._on_end(self)
        # Routers and workers may go on with it for a moment.
        self._events.after(60.0, self._scripts.drop, self._seed)


def is_right(call: ClientCall) -> bool:
    """Whether the client has got the answer's tokens, each once: all of them, or the first ones if it went away or was
    given up."""
    answer = call.turn.answer[: len(call.received)]
    is_whole = call.record.outcome != "answered" or len(call.received) == len(call.turn.answer)
    return is_whole and np.array_equal(answer, np.array(call.received, np.int32))
