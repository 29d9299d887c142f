"""Runs the router core over links: asks draft workers, drafts locally meanwhile, has the target verify, delivers
chunks."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import MappingProxyType

from actors.errors import InvalidRequest, LinkError, Overloaded, RouterLost, Unavailable
from actors.grammar.grammars import Grammars
from actors.grammar.matcher import GrammarMatcher
from actors.links.client import AsyncLink
from actors.links.heartbeat import Heartbeat
from actors.messages import (
    Failure,
    GenerationRequest,
    Hello,
    TokenChunk,
    VerifyAhead,
    VerifyBatch,
    VerifyResult,
    WorkerInfo,
)
from cluster.router.connections import Connections
from cluster.router.core import RouterCore
from cluster.router.linked_drafts import LinkedDrafts
from cluster.router.round import RequestFailed, RouterEvent
from cluster.router.run_round import RoundHooks, RoundStage, run_rounds
from cluster.router.turns import Turns

logger = logging.getLogger(__name__)

_OWN_STAGES = frozenset(("plan", "draft", "assemble", "commit"))
_IDLE_POLL_S = 0.05  # between looks while sequences wait for a target or for KV blocks
_WATCH_PERIOD_S = 1.0
_MOST_COMPILING = 2  # grammars at a time
_MOST_WAITING_GRAMMARS = 64
_MOST_WAITING_OF_TENANT = 16  # of these
_GRAMMAR_RETRY_S = 2.0
_GROUP_IS_GONE = "the router's target group is gone"
_GRACE_S = 10.0  # beyond the present step's limit


class RoundWatch:
    """Reports rounds that stand still. It looks every second from its own thread, so a blocked event loop cannot hide a
    stall. Time in which the whole process did not run counts as one look."""

    def __init__(
        self,
        rounds: RouterDriver,
        grace_s: float = _GRACE_S,
        period_s: float = _WATCH_PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Call it in the thread that runs the rounds; their attributes are read from another."""
        self._rounds = rounds
        self._grace_s = grace_s
        self._period_s = period_s
        self._clock = clock
        self._thread_id = threading.get_ident()
        self._num_steps = -1
        self._looked_at = clock()
        self._still_s = 0.0
        self._is_stalled = False
        self._heartbeat = Heartbeat(self.look, period_s, "watch of the rounds")

    @property
    def stalled_s(self) -> float:
        """How long the rounds have stood still, if longer than allowed, else 0. May be read from any thread."""
        return self._still_s if self._is_stalled else 0.0

    def look(self) -> None:
        now = self._clock()
        since_s, self._looked_at = now - self._looked_at, now
        num_steps = self._rounds.num_steps
        if num_steps != self._num_steps or not self._rounds.has_work:
            self._num_steps, self._still_s, self._is_stalled = num_steps, 0.0, False
            return
        self._still_s += min(since_s, 2 * self._period_s)
        if not self._is_stalled and self._still_s > self._rounds.step_limit_s + self._grace_s:
            self._is_stalled = True
            frame = sys._current_frames().get(self._thread_id)
            where = "".join(traceback.format_stack(frame)) if frame is not None else ""
            logger.error("rounds have stood still for %.1f s; their thread is at\n%s", self._still_s, where)

    def close(self) -> None:
        self._heartbeat.stop()


class RouterDriver:
    """One asyncio task that runs round after round while there is work and a target.

    While the target is missing or silent, streams pause, but deadlines and cancellations still take effect.
    """

    def __init__(
        self,
        core: RouterCore,
        verify_timeout_s: float,
        draft_deadline_s: float,
        grammars: Grammars | None = None,
        *,
        pool_deadlines_s: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """grammars: of the target's vocabulary; None: requests with a grammar are refused. pool_deadlines_s: of pools
        of draft workers with another deadline than draft_deadline_s, by name."""
        self.core = core
        self.num_steps = 0  # rises whenever the rounds go on
        self.step_limit_s = 0.0  # how long the present step may take
        self.router_seconds = 0.0  # time spent in the core itself, for the metrics
        self._verify_timeout_s = verify_timeout_s
        self._grammars = grammars
        self._compilers = ThreadPoolExecutor(_MOST_COMPILING, "grammars")
        self._compiling: Counter[str] = Counter()  # requests that wait for their grammar, by tenant
        self._turns = Turns(_MOST_COMPILING)
        self._target: AsyncLink | None = None
        self._incarnation: int | None = None
        self._gone: int | None = None  # the last incarnation that was counted as lost
        self._drafts = LinkedDrafts(draft_deadline_s, core.counters.draft_lateness)
        self._drafts.deadlines_s = {core.pools.index(pool): limit_s for pool, limit_s in pool_deadlines_s.items()}
        self._hooks = RoundHooks(deliver=self._deliver, begin=self._begin)
        self._stage: RoundStage = "end"
        self._stage_began = 0.0
        self._stage_limits_s = {
            "collect": max(draft_deadline_s, *pool_deadlines_s.values(), 0.0),
            "verify": verify_timeout_s,
        }
        self._streams: dict[str, asyncio.Queue[RouterEvent]] = {}
        self._work = asyncio.Event()
        self._silent: AsyncLink | None = None  # a target that left a batch unanswered and may still compute it
        self.is_draining = False  # takes no more requests
        self.others_serve = False  # other routers can serve what this one cannot
        self.is_standby = False  # it has no target group
        self._task = asyncio.create_task(self._run(), name="router rounds")
        self._timekeeper = asyncio.create_task(self._keep_time(), name="router deadlines")
        for task in (self._task, self._timekeeper):
            task.add_done_callback(self._end_broken_streams)
        self.watch = RoundWatch(self)

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    @property
    def has_target(self) -> bool:
        return self._target is not None and self._target.is_alive

    @property
    def failure(self) -> str | None:
        """Why rounds no longer run, or None while they do."""
        for task in (self._task, self._timekeeper):
            if task.done():
                return "stopped" if task.cancelled() else repr(task.exception())
        if self.watch.stalled_s:
            return f"they have stood still for {self.watch.stalled_s:.0f} s"
        return None

    def follow(self, connections: Connections) -> None:
        """Use the links that there are now. May be called at any time."""
        if connections.target is not None:
            self._set_target(*connections.target, connections.released_incarnation)
        self.others_serve, self.is_standby = connections.others_serve, connections.is_standby
        if connections.is_standby:
            self._failover(connections.released_incarnation)
        self._drafts.links = connections.draft_links()
        models = connections.draft_models()
        for pool in self.core.pools:
            self.core.set_draft_workers(models.get(pool, {}), pool)

    def _set_target(self, info: WorkerInfo, link: AsyncLink, released_incarnation: int | None) -> None:
        """A new incarnation holds no sequences; the same one behind a new link may hold some.

        released_incarnation: incarnation of a target whose end is no loss.
        """
        if self._incarnation not in (None, info.incarnation):
            logger.warning("the target is another group, or one started anew: sequences are sent again")
            self._count_loss(released_incarnation)
            self.core.target_lost()
        self._target, self._incarnation = link, info.incarnation
        self.core.max_model_len = info.max_model_len

    def _failover(self, released_incarnation: int | None) -> None:
        """The router has no target group any more and others serve: end its streams so that they resume there."""
        self._target = None
        self._count_loss(released_incarnation)
        for request_id in self._streams:
            self.core.cancel(request_id)
        self._end_streams(_GROUP_IS_GONE)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks as rounds emit them. Closing the generator cancels the sequence within one round.

        Raises what `RouterCore.add` raises, and the request's own error; RouterLost if another router can serve it.
        """
        arrived = time.monotonic()
        self._check_accepts()
        grammar = None
        if request.grammar:
            was_standby = self.is_standby
            grammar = await self._compiled(request)
            self._check_accepts()  # meanwhile much may have happened
            if self.is_standby and not was_standby:  # its stream would have been ended
                raise self._refusal(_GROUP_IS_GONE)
        self.core.add(request, arrived, grammar)
        # Bounded by the request itself: it has at most max_new_tokens chunks.
        queue: asyncio.Queue[RouterEvent] = asyncio.Queue()
        self._streams[request.request_id] = queue
        self._work.set()
        ended = False
        try:
            while not ended:
                event = await queue.get()
                ended = isinstance(event, RequestFailed) or event.finish_reason is not None
                if isinstance(event, RequestFailed):
                    raise event.error
                yield event
        finally:
            del self._streams[request.request_id]
            if not ended:
                self.core.cancel(request.request_id)
                self._work.set()

    def _check_accepts(self) -> None:
        """Raises RouterLost or Unavailable where no new request can be served."""
        if self.is_draining or self.failure is not None:
            raise self._refusal("the router is draining" if self.is_draining else "the router runs no rounds any more")

    async def _compiled(self, request: GenerationRequest) -> GrammarMatcher:
        """The matcher of the request's grammar, made in a thread: rounds go on. Raises InvalidRequest; Overloaded where
        too many grammars wait."""
        if self._grammars is None:
            given = f"{len(request.grammar)} characters"
            raise InvalidRequest(request.grammar_field, given, "this router compiles no grammars")
        known = self._grammars.known_matcher(request.grammar, request.grammar_field)
        if known is not None:  # it need not wait for others' grammars
            return known
        self._check_waiting_grammars(request.tenant)
        self._compiling[request.tenant] += 1
        try:
            await self._turns.enter(request.tenant)
            loop, make = asyncio.get_running_loop(), self._grammars.matcher
            try:
                self._check_accepts()  # a router that was closed has no threads
                job = self._compilers.submit(make, request.grammar, request.grammar_field)
            except Exception:
                self._turns.leave()
                raise

            def leave(job: Future[GrammarMatcher]) -> None:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._turns.leave)

            job.add_done_callback(leave)
            return await asyncio.wrap_future(job)
        finally:
            self._compiling[request.tenant] -= 1
            self._compiling += Counter()  # without tenants that wait for nothing

    def _check_waiting_grammars(self, tenant: str) -> None:
        """Raises Overloaded."""
        for count, limit, whose in (
            (self._compiling.total(), _MOST_WAITING_GRAMMARS, ""),
            (self._compiling[tenant], _MOST_WAITING_OF_TENANT if tenant else _MOST_WAITING_GRAMMARS, " of this tenant"),
        ):
            if count >= limit:
                raise Overloaded(f"{count} grammars{whose} wait to be compiled; that is the limit", _GRAMMAR_RETRY_S)

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests and let the open ones finish."""
        self.is_draining = True
        deadline = time.monotonic() + timeout_s
        while (self._streams or self._compiling.total()) and self.failure is None and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_IDLE_POLL_S)

    def close(self) -> None:
        """Run no more rounds. Open streams end with `Unavailable`: another router may resume them."""
        self.is_draining = True
        self.watch.close()
        self._task.cancel()
        self._timekeeper.cancel()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._end_streams("the router stops")

    async def _run(self) -> None:
        while True:
            self._step()
            self._exchange()
            if not self.core.has_work:
                await self._wait_for_work()
                self._step()
            if not await self._is_target_ready():
                await asyncio.sleep(_IDLE_POLL_S)
                continue
            outcome = await run_rounds(self.core, self._drafts, self._verify, self._hooks)
            if outcome.round is None or _is_starved(outcome.result):
                await asyncio.sleep(_IDLE_POLL_S)

    def _begin(self, stage: RoundStage) -> None:
        now = time.perf_counter()
        if self._stage in _OWN_STAGES:
            self.router_seconds += now - self._stage_began
        self._stage, self._stage_began = stage, now
        self._step(self._stage_limits_s.get(stage, _IDLE_POLL_S))

    def _step(self, limit_s: float = _IDLE_POLL_S) -> None:
        """Note progress; the next step takes at most limit_s."""
        self.num_steps += 1
        self.step_limit_s = limit_s

    async def _wait_for_work(self) -> None:
        self._work.clear()
        if not self.core.has_exchange:
            await self._work.wait()
        while not self.core.has_work:
            with suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_POLL_S):
                    await self._work.wait()
                return
            self._exchange()

    def _exchange(self) -> None:
        if not self.core.has_exchange:
            return
        started = time.perf_counter()
        self.core.exchange(time.monotonic())
        self.router_seconds += time.perf_counter() - started

    async def _keep_time(self) -> None:
        """End overdue and cancelled requests while rounds wait for a target or its answer."""
        while True:
            await self._work.wait()
            await asyncio.sleep(_IDLE_POLL_S)
            self._deliver(self.core.end_overdue(time.monotonic()))

    async def _is_target_ready(self) -> bool:
        link = self._target
        if link is None or not link.is_alive:
            return False
        if link is not self._silent:
            return True
        # A worker answers in order, so this answer means that the unanswered batch is done. A new batch sent before
        # that would only wait behind it, and be taken for one that the target cannot carry out.
        self._step(self._verify_timeout_s)
        try:
            await link.call(Hello(), self._verify_timeout_s)
        except LinkError:
            return False
        self._silent = None
        return self._target is link

    async def _verify(self, batch: VerifyBatch | VerifyAhead) -> VerifyResult | Failure | None:
        link = self._target
        if link is None or not link.is_alive:
            return None
        try:
            follows = isinstance(batch, VerifyBatch) and batch.masks_follow
            masks = self.core.masks if follows else None
            answer = await link.call(batch, self._verify_timeout_s, masks)
        except LinkError as error:
            logger.warning("round %d: no answer from the target: %s", batch.round_id, error)
            self._silent = link
            return None
        if isinstance(answer, Failure):
            logger.error("round %d: the target failed with %s", batch.round_id, answer.reason)
        assert isinstance(answer, VerifyResult | Failure)
        return answer

    def _end_broken_streams(self, task: asyncio.Task[None]) -> None:
        """A task has ended, so no round follows: end the streams so that another router may resume them."""
        if not task.cancelled():
            logger.error("%s have stopped", task.get_name(), exc_info=task.exception())
            self._end_streams("the router runs no rounds any more")

    def _end_streams(self, reason: str) -> None:
        self._deliver([RequestFailed(request_id, self._refusal(reason)) for request_id in self._streams])

    def _count_loss(self, released_incarnation: int | None) -> None:
        if self._incarnation not in (None, released_incarnation, self._gone):
            self._gone = self._incarnation
            self.core.counters.targets_lost += 1

    def _refusal(self, reason: str) -> Unavailable:
        return RouterLost(reason) if self.others_serve else Unavailable(reason)

    def _deliver(self, events: list[RouterEvent]) -> None:
        for event in events:
            queue = self._streams.get(event.request_id)
            if queue is not None:
                queue.put_nowait(event)


def _is_starved(result: VerifyResult | Failure | None) -> bool:
    """Whether no sequence of the round got the KV blocks it needed."""
    return isinstance(result, VerifyResult) and bool(result.starved_seq_ids) and not result.verdicts
