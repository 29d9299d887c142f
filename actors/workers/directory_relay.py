"""Takes calls of workers and routers in the directory's place, and passes many of them on with one call.

Ray's asynchronous actors take up to a millisecond of processor time for a call, the directory itself some ten
microseconds. So a directory with very many callers has a relay for each 750 of them. Relays have no state to lose: the
callers of one that is gone or slow call the directory again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from ray.exceptions import ActorDiedError

from actors.errors import LinkError, Unavailable
from actors.workers.directory import Asked, HeartbeatAnswer, Relayed, Told, WorkerEntry

_COLLECT_S = 0.05  # for which calls are collected
_QUIET_S = 0.2  # without a call of anybody; the directory says then which routers to wake
# For which callers wait for the directory. They leave a relay later: `Registration`'s limit, and `RELAY_TIMEOUT_S`.
_HEARTBEAT_S = 1.6
_QUESTION_S = 1.2
_LONGEST_CALL_S = 3.0  # of the directory, which has most to tell after a restart
_CUT_OFF_S = 3.5  # without an answer of the directory; then callers are to try it themselves
_FAILED_S = 0.5  # that the failure of a call is held back, so that callers do not call again at once

RELAY_TIMEOUT_S = 1.5
"""For which a router waits for a relay, beyond `Told.longest_wait_s`. Both together are shorter than a lease, so that
it reaches the directory before its claim expires."""

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class Upstream(Protocol):
    """The directory, as a relay calls it."""

    async def relayed(self, entries: list[WorkerEntry], questions: list[Asked]) -> Relayed: ...

    async def remove(self, worker_id: str, incarnation: int) -> None: ...

    async def release_target(self, router_id: str) -> None: ...


@dataclass(slots=True, eq=False)
class _Call(Generic[Question, Answer]):
    question: Question
    answer: asyncio.Future[Answer]


class Relay:
    """For one event loop, in which `run` is running."""

    def __init__(self, directory: Upstream) -> None:
        self._directory = directory
        # The last call of each caller, until it is passed on. It is passed on also if the caller has given up, since it
        # renews a lease; an answer that comes too late is for the caller's next call.
        self._heartbeats: dict[str, _Call[WorkerEntry, HeartbeatAnswer]] = {}
        # Answers come with an event that is set when there may be news, or None if they are news themselves.
        self._questions: dict[str, _Call[Asked, tuple[Told, asyncio.Event | None]]] = {}
        self._waiting: dict[str, asyncio.Event] = {}  # the same events, by router
        self._called = asyncio.Event()
        self._heard_at: float | None = None  # when the directory last answered, or the first call of it began

    async def heartbeat(self, entry: WorkerEntry) -> HeartbeatAnswer:
        """`Directory.heartbeat`. Raises Unavailable while the directory does not answer, LinkError after a while."""
        return await self._put(self._heartbeats, entry.worker_id, entry, _HEARTBEAT_S)

    async def follow(self, asked: Asked) -> Told | None:
        """`Directory.follow`. Raises as `heartbeat`."""
        told, woken = await self._put(self._questions, asked.router_id, asked, _QUESTION_S)
        if woken is None:
            return told
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(told.longest_wait_s):
                    await woken.wait()
        finally:
            if self._waiting.get(asked.router_id) is woken:
                del self._waiting[asked.router_id]
        return None if told.mark == asked.mark else told

    async def remove(self, worker_id: str, incarnation: int) -> None:
        """`Directory.remove`, after the worker's heartbeats."""
        _fail(self._heartbeats.pop(worker_id, None), Unavailable("the worker leaves"))
        await self._directory.remove(worker_id, incarnation)

    async def release_target(self, router_id: str) -> None:
        """`Directory.release_target`, after the router's questions."""
        _fail(self._questions.pop(router_id, None), Unavailable("the router leaves"))
        await self._directory.release_target(router_id)

    async def run(self) -> None:
        """Pass on calls until the directory is gone for good: ActorDiedError."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._called.wait(), _QUIET_S)
                await asyncio.sleep(_COLLECT_S)
            self._called.clear()
            await self._pass_on()

    async def _put(
        self, calls: dict[str, _Call[Question, Answer]], caller: str, question: Question, limit_s: float
    ) -> Answer:
        call: _Call[Question, Answer] = _Call(question, asyncio.get_running_loop().create_future())
        _fail(calls.get(caller), Unavailable("the caller has called again"))
        calls[caller] = call
        self._called.set()
        try:
            async with asyncio.timeout(limit_s):
                return await call.answer
        except TimeoutError:
            raise self._failure(f"within {limit_s:g} s") from None

    def _failure(self, how: str) -> Unavailable | LinkError:
        silent_s = 0.0 if self._heard_at is None else asyncio.get_running_loop().time() - self._heard_at
        kind = LinkError if silent_s > _CUT_OFF_S else Unavailable
        return kind(f"the directory did not answer {how}")

    async def _pass_on(self) -> None:
        heartbeats, questions = dict(self._heartbeats), dict(self._questions)
        self._heartbeats.clear()
        self._questions.clear()
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time() if self._heard_at is None else self._heard_at
        try:
            async with asyncio.timeout(_LONGEST_CALL_S):
                relayed = await self._directory.relayed(
                    [call.question for call in heartbeats.values()], [call.question for call in questions.values()]
                )
        except ActorDiedError:
            raise
        except Exception as error:
            await asyncio.sleep(_FAILED_S)
            for heartbeat in heartbeats.values():
                _fail(heartbeat, self._failure(f"({error!r})"))
            for question in questions.values():
                _fail(question, self._failure(f"({error!r})"))
            return
        self._heard_at = loop.time()
        for (worker_id, heartbeat), answer in zip(heartbeats.items(), relayed.heartbeats, strict=True):
            if heartbeat.answer.done():
                heartbeat = self._heartbeats.get(worker_id, heartbeat)
            if not heartbeat.answer.done():
                heartbeat.answer.set_result(answer)
        for (router_id, question), (told, is_news) in zip(questions.items(), relayed.told, strict=True):
            later = self._questions.get(router_id)
            if question.answer.done() and later is not None and _asks_the_same(question.question, later.question):
                question = self._questions.pop(router_id)
            if not question.answer.done():
                woken = None
                if not is_news:
                    woken = self._waiting[router_id] = asyncio.Event()
                question.answer.set_result((told, woken))
        # After the answers: a router may have been woken by what came with its own question.
        for router_id in relayed.woken:
            if router_id in self._waiting:
                self._waiting[router_id].set()


def _asks_the_same(question: Asked, later: Asked) -> bool:
    """Demand may differ: it is told again with the next question."""
    return replace(later, drafts=question.drafts, targets=question.targets) == question


def _fail(call: _Call[Any, Any] | None, error: Exception) -> None:
    if call is not None and not call.answer.done():
        call.answer.set_exception(error)
