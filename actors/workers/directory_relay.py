"""Takes calls of workers and routers in the directory's place, and passes many of them on with one call.

Ray's asynchronous actors take up to a millisecond of processor time for a call, the directory itself some ten
microseconds. So a directory with very many callers has a relay for each 750 of them. Relays have no state to lose: the
callers of one that is gone or slow call the directory again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import ray
from ray.actor import ActorProxy
from ray.exceptions import ActorDiedError

from actors.errors import Unavailable
from actors.workers.directory import Asked, Directory, HeartbeatAnswer, Relayed, Told, WorkerEntry

logger = logging.getLogger(__name__)

_COLLECT_S = 0.05  # for which calls are collected
_QUIET_S = 0.2  # without a call of anybody; the directory says then which routers to wake
_TIMEOUT_S = 0.8  # less than callers wait, who should not give up a relay because the directory is away

Question = TypeVar("Question")
Answer = TypeVar("Answer")

Exchange: TypeAlias = Callable[[list[WorkerEntry], list[Asked]], Awaitable[Relayed]]
"""`Directory.relayed`."""


@dataclass(slots=True, eq=False)
class _Call(Generic[Question, Answer]):
    question: Question
    answer: asyncio.Future[Answer]


class Relay:
    """For one event loop, in which `run` is running."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._heartbeats: list[_Call[WorkerEntry, HeartbeatAnswer]] = []
        self._questions: list[_Call[Asked, tuple[Told, bool]]] = []
        self._woken: dict[str, asyncio.Event] = {}  # of routers that wait
        self._called = asyncio.Event()

    async def heartbeat(self, entry: WorkerEntry) -> HeartbeatAnswer:
        """`Directory.heartbeat`. Raises Unavailable while the directory does not answer."""
        return await self._put(self._heartbeats, entry)

    async def follow(self, asked: Asked) -> Told | None:
        """`Directory.follow`. Raises Unavailable while the directory does not answer."""
        told, is_news = await self._put(self._questions, asked)
        if is_news:
            return told
        woken = self._woken[asked.router_id]
        with suppress(TimeoutError):
            async with asyncio.timeout(told.longest_wait_s):
                await woken.wait()
        if self._woken.get(asked.router_id) is woken:
            del self._woken[asked.router_id]
        return None if told.mark == asked.mark else told

    async def run(self) -> None:
        """Pass on calls forever."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._called.wait(), _QUIET_S)
                await asyncio.sleep(_COLLECT_S)
            self._called.clear()
            await self._pass_on()

    async def _put(self, calls: list[_Call[Question, Answer]], question: Question) -> Answer:
        call: _Call[Question, Answer] = _Call(question, asyncio.get_running_loop().create_future())
        calls.append(call)
        self._called.set()
        return await call.answer

    async def _pass_on(self) -> None:
        heartbeats, self._heartbeats = self._heartbeats, []
        questions, self._questions = self._questions, []
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                relayed = await self._exchange(
                    [call.question for call in heartbeats], [call.question for call in questions]
                )
        except Exception as error:
            # Those that came meanwhile have waited, too.
            _fail([*heartbeats, *questions, *self._heartbeats, *self._questions], error)
            self._heartbeats, self._questions = [], []
            if isinstance(error, ActorDiedError):
                raise
            return
        # Events come before answers, and these before names: a name may be that of a router that asked with this call.
        for call, (_, is_news) in zip(questions, relayed.told, strict=True):
            if not is_news:
                self._woken[call.question.router_id] = asyncio.Event()
        _answer(heartbeats, relayed.heartbeats)
        _answer(questions, relayed.told)
        for router_id in relayed.woken:
            if router_id in self._woken:
                self._woken[router_id].set()


def _answer(calls: Sequence[_Call[Question, Answer]], answers: Sequence[Answer]) -> None:
    for call, answer in zip(calls, answers, strict=True):
        if not call.answer.done():  # its caller may have given up
            call.answer.set_result(answer)


def _fail(calls: Sequence[_Call[Any, Any]], error: Exception) -> None:
    for call in calls:
        if not call.answer.done():
            call.answer.set_exception(Unavailable(f"the directory did not answer: {error!r}"))


class RelayActor(Relay):
    """A relay as an actor, which ends when its directory is gone for good."""

    def __init__(self, name: str, directory: ActorProxy[Directory]) -> None:
        super().__init__(lambda entries, questions: directory.relayed.remote(name, entries, questions))
        self._running = asyncio.get_running_loop().create_task(self._run_and_end())

    async def _run_and_end(self) -> None:
        try:
            await self.run()
        except ActorDiedError:
            logger.info("the relay ends with its directory")
        finally:
            ray.kill(ray.get_runtime_context().current_actor)
