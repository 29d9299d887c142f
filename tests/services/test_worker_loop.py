"""The loop of a worker over a real link: progress that health checks can see, failures that end no loop."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from actors.errors import Unavailable
from actors.links.client import AsyncLink
from actors.links.keys import LinkKeys
from actors.links.server import LinkServer
from actors.messages import DraftBatch, DraftResult, Failure, Hello, VerifyBatch, VerifyResult, WorkerInfo
from actors.workers.target_group import check_ranks
from actors.workers.target_rank import RankHealth
from actors.workers.worker_loop import WorkerLoop

ROUTER_KEYS = LinkKeys.generate()
INFO = WorkerInfo("target", 7, 100, 2048, 16, 64)
PATIENCE_S = 20.0


class Engine:
    """Waits for leave to answer, and may fail."""

    def __init__(self) -> None:
        self.leave = threading.Event()
        self.error: Exception | None = None
        self.num_cleared = 0
        self.ahead: list[int] = []  # batches answered when each step of work ahead began
        self.num_answered = 0
        self.steps = threading.Semaphore(0)  # of work ahead, allowed

    def answer(self, batch: VerifyBatch | DraftBatch) -> VerifyResult | DraftResult:
        self.leave.wait()
        if self.error is not None:
            raise self.error
        self.num_answered += 1
        return VerifyResult(batch.round_id, [])

    def work_ahead(self) -> bool:
        """Three steps after each answer."""
        self.ahead.append(self.num_answered)
        assert self.steps.acquire(timeout=PATIENCE_S)
        return self.ahead.count(self.num_answered) < 3

    def clear(self) -> None:
        self.num_cleared += 1


@contextmanager
def working(engine: Engine, ahead: bool = False) -> Iterator[tuple[WorkerLoop, LinkServer]]:
    with LinkServer(LinkKeys.generate(), [ROUTER_KEYS.public]) as server:
        loop = WorkerLoop(engine, server, INFO, work_ahead=engine.work_ahead if ahead else None)
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            yield loop, server
        finally:
            engine.leave.set()
            loop.stop()
            thread.join()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


async def answer_to(link: AsyncLink, message: Hello | VerifyBatch) -> object:
    return await link.call(message, PATIENCE_S)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_batch_that_hangs_shows_until_it_is_done(fails: bool) -> None:
    engine = Engine()
    engine.error = RuntimeError("a bug") if fails else None
    with working(engine) as (loop, server), closing(AsyncLink(server.address, ROUTER_KEYS)) as link:
        assert await answer_to(link, Hello()) == INFO
        assert loop.busy_s == 0.0
        answer = asyncio.create_task(answer_to(link, VerifyBatch(1, [])))
        await asyncio.to_thread(until, lambda: loop.busy_s > 0.1)
        assert loop.num_batches == 0
        engine.leave.set()
        assert isinstance(await answer, Failure if fails else VerifyResult)
        assert loop.busy_s == 0.0
        assert (loop.num_batches, engine.num_cleared) == ((0, 1) if fails else (1, 0))
        assert await answer_to(link, Hello()) == INFO  # the loop lives on


async def test_work_ahead_follows_an_answer_and_a_message_waits_for_one_step_of_it():
    engine = Engine()
    engine.leave.set()
    with working(engine, ahead=True) as (_, server), closing(AsyncLink(server.address, ROUTER_KEYS)) as link:
        assert isinstance(await answer_to(link, VerifyBatch(1, [])), VerifyResult)
        await asyncio.to_thread(until, lambda: engine.ahead == [1])
        second = asyncio.create_task(answer_to(link, VerifyBatch(2, [])))
        await asyncio.to_thread(until, lambda: server.stats.sent == 1)
        await asyncio.sleep(0.2)  # it lies in the queue by now
        assert not second.done()
        engine.steps.release()
        assert isinstance(await second, VerifyResult)
        for _ in range(3):
            engine.steps.release()
        await asyncio.to_thread(until, lambda: len(engine.ahead) == 4)
        assert engine.ahead == [1, 2, 2, 2]
        await asyncio.sleep(0.3)
        assert len(engine.ahead) == 4  # done: nothing is worked on until the next answer


def test_a_loop_that_stands_still_outside_of_a_batch_shows_and_fails_the_groups_health_check() -> None:
    let_go = threading.Event()
    with LinkServer(LinkKeys.generate(), [ROUTER_KEYS.public]) as server:
        loop = WorkerLoop(Engine(), server, INFO, on_turn=let_go.wait)
        thread = threading.Thread(target=loop.run)
        assert loop.turn_s == 0.0
        thread.start()
        try:
            until(lambda: loop.turn_s > 0.5)  # polls are shorter
            assert loop.busy_s == 0.0
            still = RankHealth(None, loop.num_batches, loop.busy_s, 1, loop.turn_s)
            check_ranks([still], 60.0)
            with pytest.raises(Unavailable, match="rank 0: its loop has stood still"):
                check_ranks([still], 0.4)
            loop.stop()
            let_go.set()
        finally:
            let_go.set()
            loop.stop()
            thread.join()
    assert loop.turn_s == 0.0


async def test_what_is_done_every_turn_is_done_however_many_messages_arrive() -> None:
    """Ranks that hear nothing end, and a batch need not be told to them."""
    turns: list[int] = []
    engine = Engine()
    engine.leave.set()
    with LinkServer(LinkKeys.generate(), [ROUTER_KEYS.public]) as server:
        loop = WorkerLoop(engine, server, INFO, on_turn=lambda: turns.append(engine.num_answered))
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            with closing(AsyncLink(server.address, ROUTER_KEYS)) as link:
                await asyncio.gather(*(answer_to(link, VerifyBatch(number, [])) for number in range(50)))
        finally:
            loop.stop()
            thread.join()
    assert set(range(50)) <= set(turns)


async def test_time_in_batches_adds_up() -> None:
    engine = Engine()
    with working(engine) as (loop, server), closing(AsyncLink(server.address, ROUTER_KEYS)) as link:
        answer = asyncio.create_task(answer_to(link, VerifyBatch(1, [])))
        await asyncio.to_thread(until, lambda: loop.busy_total_s > 0.1)
        engine.leave.set()
        await answer
        first_s = loop.busy_total_s
        assert first_s > 0.1
        await answer_to(link, VerifyBatch(2, []))
        assert first_s <= loop.busy_total_s < first_s + PATIENCE_S


def test_a_group_fails_its_health_check_when_a_batch_takes_too_long_or_a_rank_has_ended() -> None:
    idle, busy = RankHealth(None, 9, 0.0, 1), RankHealth(None, 9, 30.0, 1)
    check_ranks([busy, idle], 60.0)
    with pytest.raises(Unavailable, match=r"rank 0: a batch has been running for 30\.0 s, the limit is 20 s"):
        check_ranks([busy, idle], 20.0)
    with pytest.raises(Unavailable, match="rank 1: RuntimeError"):
        check_ranks([busy, RankHealth("RuntimeError: gone", 9, 0.0, 1)], 60.0)


def test_the_process_of_a_rank_does_not_import_ray_serve():
    modules = "sys, actors.workers.target_rank, actors.workers.target_worker"
    code = f"import {modules}; print({{'ray', 'ray.serve'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "{'ray'}\n"
