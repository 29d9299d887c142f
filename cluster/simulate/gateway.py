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
from cluster.routing.known_routers import RoutedPrompt
from cluster.routing.prefix_blocks import BLOCK_TOKENS, namespace_block, prefix_blocks
from cluster.simulate.connection import NOTICED_S, Connection
from cluster.simulate.events import Action, Events, Server
from cluster.simulate.options import CostOptions
from cluster.simulate.records import Record
from cluster.simulate.rounds import Group
from cluster.simulate.router_choice import RouterChoice
from cluster.simulate.scripts import Script, Scripts
from cluster.simulate.tenant_leases import GatewayLimiters
from cluster.simulate.traffic import Turn
from cluster.tenants.limiter import TenantLimiter
from cluster.tenants.scope import Scope

_RETRY_S = 1.0  # of a client whose request was refused without a Retry-After
_FULL = "the router's queue is full"
GATEWAY_LOST = "GatewayLost"  # outcome of a request whose gateway dies, or that finds none


@dataclass(frozen=True, slots=True)
class SimulatedTenant:
    id: str
    scope: Scope
    weight: float = 1.0


class Gateway:
    """One gateway process, which may die and come back."""

    def __init__(
        self,
        events: Events,
        costs: CostOptions,
        make_choice: Callable[[], RouterChoice],
        make_limiters: Callable[[Gateway], GatewayLimiters],
        on_return: Callable[[Gateway], object] = lambda gateway: None,
    ) -> None:
        """make_choice, make_limiters: called at each start. on_return: it listens to routers again."""
        self.events = events
        self.costs = costs
        self.server = Server(events)
        self.is_there = True
        self.num_probes = 0  # of earlier lives
        self.store = Connection(events)
        self._calls: dict[ClientCall, None] = {}  # that it has, in the order in which they came
        self._connections: dict[str, Connection] = {}  # by router
        self._make_choice = make_choice
        self._make_limiters = make_limiters
        self._on_return = on_return
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.choice = self._make_choice()
        self.limiters = self._make_limiters(self)

    def connection(self, router: str) -> Connection:
        if router not in self._connections:
            self._connections[router] = Connection(self.events)
        return self._connections[router]

    def hear(self, router: str, news: bytes, now: float) -> None:
        if self.is_there and not self.connection(router).is_cut:
            self.choice.hear(news, now)

    def enter(self, call: ClientCall) -> None:
        self._calls[call] = None

    def leave(self, call: ClientCall) -> None:
        self._calls.pop(call, None)

    def lose(self) -> None:
        """Its clients' connections break."""
        if not self.is_there:
            return
        self.is_there = False
        self.limiters.close()
        self.server.busy_until = self.events.now
        calls, self._calls = self._calls, {}
        for call in calls:
            call.gateway_lost()

    def bring(self) -> None:
        """It starts anew and knows nothing."""
        if not self.is_there:
            self.is_there = True
            self.num_probes += self.choice.num_probes
            self._begin_anew()
            self._on_return(self)


class ClientCall:
    """A client's request from its first sending to its end, which comes exactly once: `on_end` is told of it."""

    def __init__(
        self,
        turn: Turn,
        tenant: SimulatedTenant,
        next_gateway: Callable[[], Gateway],
        scripts: Scripts,
        *,
        timeout_s: float,
        retries: int,
        on_end: Callable[[ClientCall], object],
    ) -> None:
        """next_gateway: where a client sends a request, at first and when its gateway has gone."""
        self.turn = turn
        self.record = Record(
            tenant=turn.conversation.tenant,
            turn=turn.number,
            num_prompt=turn.num_prompt,
            arrived=0.0,
            service_class=turn.conversation.service_class,
        )
        self.received: list[int] = []
        self._next_gateway = next_gateway
        self.gateway = next_gateway()
        self._events = self.gateway.events
        self._scripts = scripts
        self._retries = retries
        self._on_end = on_end
        scope, told = tenant.scope, turn.conversation
        told.blocks = prefix_blocks(turn.text, scope.prefix_namespace or scope.namespace, told.blocks)
        self._blocks = told.blocks
        self._seed = scripts.add(Script(turn.answer, told.tenant, turn.prefixes, self._blocks))
        self._request = GenerationRequest(
            request_id=f"request-{self._seed}",
            prompt_token_ids=turn.prompt,
            sampling=SamplingParams(self._seed, temperature=0.0),
            max_new_tokens=len(turn.text) - turn.num_prompt,
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
        if not self.gateway.is_there:
            self.gateway = self._next_gateway()
        costs = self.gateway.costs
        if not self.gateway.is_there:
            self._end(GATEWAY_LOST, self._events.now + costs.hop_s)
            return
        self.gateway.enter(self)
        self._events.after(costs.hop_s, self._arrive)

    def _arrive(self) -> None:
        if not self._is_over:
            self.gateway.server.run(self.gateway.costs.gateway_request_s, self._enter)

    def _enter(self) -> None:
        """The gateway has read it."""
        if not self._is_over:
            self.gateway.limiters.enter(self.turn.conversation.tenant, self._admit)

    def _admit(self, limiter: TenantLimiter) -> None:
        if self._is_over:
            return
        try:
            limiter.take_request()
            limiter.check_tokens(self.turn.num_prompt)
        except PacelineError as error:
            self._refused(error)
            return
        self.gateway.limiters.await_place(self.turn.conversation.tenant, self._begin_answer)

    def _begin_answer(self, limiter: TenantLimiter) -> None:
        if self._is_over:
            return
        try:
            places = limiter.admitted(self.turn.num_prompt, 1)
            places.__enter__()
        except PacelineError as error:
            self._refused(error)
            return
        self._places = places
        self._stream = UnbrokenStream(self._request, self._events.now)
        self._route()

    def _route(self) -> None:
        assert self._stream is not None
        rest, choice = self._stream.rest, self.gateway.choice
        rest = msgspec.structs.replace(rest, asks_another=choice.has_others and rest.refusal is None)
        num_tokens = len(rest.prompt_token_ids)
        blocks = self._blocks[: num_tokens // BLOCK_TOKENS]
        prompt = RoutedPrompt(num_tokens, blocks, namespace_block(rest.namespace))
        group = self._group = choice.choose(rest, prompt, self._events.now)
        self._asked = rest.request_id
        if group is None:
            self._lost(self._asked, Overloaded(_FULL, _RETRY_S))
        else:
            self._pass(group, self._asked, self._accept, group, rest)

    def _pass(self, group: Group, asked: str, action: Action, *args: object) -> None:
        """Between gateway and router, either way. Where the connection breaks, both ends notice."""
        passes_at = self.gateway.connection(group.name).passes_at
        if passes_at is None:
            self._events.after(NOTICED_S, self._broken, group, asked)
        else:
            self._events.at(passes_at + self.gateway.costs.hop_s, action, *args)

    def _broken(self, group: Group, asked: str) -> None:
        group.cancel(asked)
        self._lost(asked, RouterLost("the router does not answer"))

    def _accept(self, group: Group, rest: GenerationRequest) -> None:
        """The request has come to the router."""
        asked = rest.request_id
        if self._is_over or asked != self._asked:
            return
        try:
            group.accept(rest, lambda event: self._pass(group, asked, self._read, asked, event))
        except PacelineError as error:
            self._pass(group, asked, self._lost, asked, error)
            return
        self.gateway.choice.accepted(group, self._events.now)

    def _read(self, asked: str, event: RouterEvent) -> None:
        """What the router has committed has come to the gateway."""
        if self._is_over or asked != self._asked:
            return
        if isinstance(event, RequestFailed):
            self._lost(asked, event.error)
        else:
            self.gateway.server.run(self.gateway.costs.gateway_chunk_s, self._take, asked, event)

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
        self.gateway.limiters.of(self.record.tenant).spend(len(chunk.token_ids))
        self._show(chunk)
        if chunk.finish_reason is not None:
            self.gateway.choice.ended(self._group, self._events.now)

    def _show(self, chunk: TokenChunk) -> None:
        """The client sees a chunk, a hop later than now."""
        now = self._events.now + self.gateway.costs.hop_s
        self.received += chunk.token_ids
        if chunk.token_ids:
            self.record.first_at = self.record.first_at or now
            self.record.ended_at = now
        if chunk.finish_reason is not None:
            self._end("answered" if chunk.finish_reason == "length" else chunk.finish_reason, now)
        elif self.turn.cancel_after is not None and len(self.received) > self.turn.cancel_after:
            if self._group is not None:
                self._group.cancel(self._asked)
                self.gateway.choice.ended(self._group, self._events.now)
            self._end("cancelled", now)

    def gateway_lost(self) -> None:
        """Its gateway dies: routers notice it after a hop, and so does the client."""
        hop_s = self.gateway.costs.hop_s
        if self._group is not None and self._asked:
            self._events.after(hop_s, self._group.cancel, self._asked)
        self._end(GATEWAY_LOST, self._events.now + hop_s)

    def _lost(self, asked: str, error: PacelineError) -> None:
        """The router has refused or broken the stream."""
        if self._is_over or asked != self._asked:
            return
        assert self._stream is not None
        self._asked = ""  # what still comes of it is too late
        if self._group is not None:
            self.gateway.choice.ended(self._group, self._events.now)
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
        if self._is_over:
            return
        assert self._stream is not None
        self._stream.ask_again(self._events.now)
        self._route()

    def _refused(self, error: PacelineError) -> None:
        """The client gets the error, and may send the request again."""
        self._leave_places()
        self.gateway.leave(self)
        if isinstance(error, Overloaded):
            self.record.refusals += 1
            if self.record.refusals <= self._retries:
                self._events.after(error.retry_after_s + self.gateway.costs.hop_s, self._send)
                return
        self._end(type(error).__name__, self._events.now + self.gateway.costs.hop_s)

    def _leave_places(self) -> None:
        if self._places is not None:
            self._places.__exit__(None, None, None)
            self._places = None

    def _end(self, outcome: str, now: float) -> None:
        assert not self._is_over
        self._is_over = True
        self._leave_places()
        self.gateway.leave(self)
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
