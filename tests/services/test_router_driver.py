"""Rounds of driver, `cluster.router.linked_drafts` and connections over real links, with toy workers that are slow,
fail, vanish and return."""

import asyncio
import itertools
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from types import MappingProxyType

import msgspec
import numpy as np
import pytest

from actors.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    Overloaded,
    PacelineError,
    RouterLost,
    Unavailable,
)
from actors.links.keys import LinkKeys
from actors.links.server import LinkServer
from actors.messages import DraftBatch, DraftResult, GenerationRequest, VerifyBatch, VerifyResult, WorkerInfo
from actors.workers.directory import WorkerEntry
from actors.workers.worker_loop import WorkerLoop
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.connections import Connections, keep_connected
from cluster.router.core import RouterCore
from cluster.router.driver import RoundWatch, RouterDriver
from cluster.router.metrics import RouterMetrics
from cluster.router.status import router_status
from cluster.router.worker_drafting import DraftShape
from cluster.routing.router_status import RouterStatus
from paceline_testing.clock import Clock
from paceline_testing.rounds import toy_info, toy_request
from paceline_testing.scraped import value_of
from paceline_testing.toy_drafters import ToyDraftWorker
from paceline_testing.toy_target import ToyTarget

EOS = 3
ROUTER_KEYS = LinkKeys.generate()
PATIENCE_S = 20.0  # how long a busy machine may take for what should be immediate
_numbers = itertools.count(1)


class TargetEngine:
    """A toy target with a switch for what goes wrong before a batch is carried out."""

    def __init__(self) -> None:
        self.toy = ToyTarget(eos_token_id=EOS, seed=4)
        self.before: Callable[[VerifyBatch], None] = lambda batch: None
        self.num_batches = 0
        self.most_items = 0

    def answer(self, batch: VerifyBatch) -> VerifyResult:
        self.before(batch)
        self.num_batches += 1
        self.most_items = max(self.most_items, len(batch.items))
        time.sleep(0.001)
        return self.toy.verify(batch)

    def clear(self) -> None:
        self.toy.lose_all()


class DraftEngine(ToyDraftWorker):
    """Drafts chains that are right four times in five."""

    def __init__(self) -> None:
        super().__init__(self.mostly_right)
        self.toy = ToyTarget(eos_token_id=EOS, seed=4)
        self.random = random.Random(1)
        self.before: Callable[[DraftBatch], None] = lambda batch: None
        self.num_batches = 0

    def mostly_right(self, tokens: list[int], count: int) -> list[int]:
        return [token if self.random.random() < 0.8 else 0 for token in self.toy.text_after(tokens, count)]

    def answer(self, batch: DraftBatch) -> DraftResult:
        self.before(batch)
        self.num_batches += 1
        return self.draft(batch)

    def clear(self) -> None:
        self.sequences.clear()


class Worker:
    """An engine behind a link, with its loop in a thread."""

    def __init__(self, engine: TargetEngine | DraftEngine, worker_id: str) -> None:
        self.engine = engine
        role = "target" if isinstance(engine, TargetEngine) else "draft"
        incarnation = next(_numbers)
        toy = engine.toy
        self.info = WorkerInfo(role, incarnation, toy.vocab_size, toy.max_model_len, toy.block_size, toy.total_blocks)
        self.server = LinkServer(LinkKeys.generate(), [ROUTER_KEYS.public])
        self.loop = WorkerLoop(engine, self.server, self.info)
        pool = worker_id.partition("-")[0] if role == "draft" else "draft"
        self.entry = WorkerEntry(role, worker_id, self.server.address, incarnation, pool=pool)
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()

    def stop(self) -> None:
        self.loop.stop()
        self._thread.join()
        self.server.close()


class Cluster:
    """A router's driver and connections, its workers, and the books on every request."""

    def __init__(self, verify_timeout_s: float, pool_deadlines_s: Mapping[str, float], **config: int) -> None:
        """pool_deadlines_s: of pools of draft workers beside the first."""
        self.workers: dict[str, Worker] = {}
        self.claim: Callable[[str | None], str | None] = lambda found: found  # what the directory says, of the first
        self.listed: list[WorkerEntry] = []
        self.clock = Clock()  # for how long a group that leaves is used
        self.connections = Connections(ROUTER_KEYS, self.clock)
        shapes = {pool: DraftShape() for pool in ("draft", *pool_deadlines_s)}
        self.core = RouterCore(
            toy_info(97, 256, 4), RouterConfig(**config), SpeculationConfig(), {}, draft_shapes=shapes
        )
        self.driver = RouterDriver(self.core, verify_timeout_s, 0.1, pool_deadlines_s=pool_deadlines_s)
        self.following = asyncio.create_task(keep_connected(self.connections, self.list_workers, self.follow))
        self.toy = ToyTarget(eos_token_id=EOS, seed=4)

    async def list_workers(self) -> tuple[list[WorkerEntry], str | None]:
        found = next((entry.worker_id for entry in self.listed if entry.role == "target"), None)
        return list(self.listed), self.claim(found)

    def follow(self) -> None:
        self.driver.follow(self.connections)

    def start(self, worker_id: str = "target", max_model_len: int = 256) -> Worker:
        engine = TargetEngine() if worker_id.startswith("target") else DraftEngine()
        engine.toy.max_model_len = max_model_len
        worker = self.workers[worker_id] = Worker(engine, worker_id)
        self.listed = [entry for entry in self.listed if entry.worker_id != worker_id] + [worker.entry]
        return worker

    async def stop(self, worker_id: str) -> None:
        worker = self.workers.pop(worker_id)
        self.listed = [entry for entry in self.listed if entry.worker_id != worker_id]
        await asyncio.to_thread(worker.stop)

    async def lose_target(self) -> None:
        await self.stop("target")
        await until(lambda: not self.driver.has_target)

    async def stream(self, request: GenerationRequest, on_chunk: Callable[[], None] = lambda: None) -> list[int]:
        """The request's tokens, which must be the target's own, in chunks that are in order and end once."""
        tokens: list[int] = []
        ended = None
        index = 0
        async with aclosing(self.driver.generate(request)) as chunks:
            async for chunk in chunks:
                assert ended is None
                assert chunk.index == index
                index += 1
                tokens += chunk.token_ids
                ended = chunk.finish_reason
                on_chunk()
        assert (tokens, ended) == self.toy.complete(request)
        return tokens

    def streams(self, count: int, max_new_tokens: int = 200) -> list[asyncio.Task[list[int]]]:
        """Running requests without stop tokens."""
        return [asyncio.create_task(self.stream(request(max_new_tokens, stop_token_ids=()))) for _ in range(count)]

    async def begun(self, *requests: GenerationRequest, chunks: int = 1) -> list[asyncio.Task[list[int]]]:
        """Running requests, of which so many chunks have come."""
        seen = asyncio.Semaphore(0)
        streams = [asyncio.create_task(self.stream(one, seen.release)) for one in requests]
        for _ in range(chunks):
            await seen.acquire()
        return streams

    @property
    def status(self) -> RouterStatus:
        return router_status(self.driver, self.connections)

    async def nothing_is_left(self) -> None:
        """At the router, the target and the draft workers; finished sequences are told with the next messages."""
        await until(lambda: not self.core.has_work)
        assert not self.driver._streams
        assert not self.core.num_running
        assert not self.core.num_waiting
        assert self.driver.failure is None
        for worker in self.workers.values():
            if isinstance(worker.engine, TargetEngine):
                await until(lambda toy=worker.engine.toy: toy.free_blocks == toy.total_blocks)  # type: ignore[misc]
            else:
                await until(lambda held=worker.engine.sequences: not held)  # type: ignore[misc]


@asynccontextmanager
async def cluster(
    drafts: int = 0,
    verify_timeout_s: float = 10.0,
    survives: bool = True,
    pool_deadlines_s: Mapping[str, float] = MappingProxyType({}),
    **config: int,
) -> AsyncIterator[Cluster]:
    """A running cluster with one target. A router that survives may in the end have nothing left of any request.
    pool_deadlines_s: of further pools of draft workers, each with one worker."""
    one = Cluster(verify_timeout_s, pool_deadlines_s, **config)
    try:
        one.start()
        for index in range(drafts):
            one.start(f"draft-{index}")
        for pool in pool_deadlines_s:
            one.start(f"{pool}-0")
        drafts += len(pool_deadlines_s)
        # The driver's own links: it is told of a new one a moment after it stands.
        await until(lambda: one.driver.has_target and len(one.driver._drafts.links) == drafts)
        yield one
        if survives:
            await one.nothing_is_left()
    finally:
        one.following.cancel()
        one.driver.close()
        one.connections.close()
        for worker_id in list(one.workers):
            await one.stop(worker_id)


def blocked(engine: TargetEngine | DraftEngine) -> tuple[threading.Event, threading.Event]:
    """Hold up every batch: (a batch has come, let them go)."""
    entered, released = threading.Event(), threading.Event()

    def hang(batch: VerifyBatch | DraftBatch) -> None:
        entered.set()
        released.wait()

    engine.before = hang
    return entered, released


async def until(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


def request(max_new_tokens: int = 60, num_prompt: int = 5, **fields: object) -> GenerationRequest:
    number = next(_numbers)
    prompt = np.random.default_rng(number).integers(4, 97, num_prompt)
    return toy_request(f"r{number}", prompt, max_new_tokens, **fields)


def requests(count: int = 6) -> list[GenerationRequest]:
    return [request(20 + 30 * (index % 3), 1 + 17 * (index % 4)) for index in range(count)]


def stalls(seconds: float, every: int) -> Callable[[VerifyBatch | DraftBatch], None]:
    """Holds up one batch in so many."""
    count = itertools.count(1)

    def before(batch: VerifyBatch | DraftBatch) -> None:
        if next(count) % every == 0:
            time.sleep(seconds)

    return before


async def test_streams_are_the_targets_own_text_with_two_draft_workers() -> None:
    async with cluster(drafts=2) as one:
        await asyncio.gather(*map(one.stream, requests(12)))
        assert one.core.counters.accepted_tokens["draft_model"] > 100
        assert all(worker.engine.num_batches for worker in one.workers.values())
        assert one.core.counters.stale_sequences == one.core.counters.abandoned_rounds == 0


async def test_two_draft_models_draft_for_the_same_streams_and_one_gives_way_to_another() -> None:
    async with cluster(drafts=1, pool_deadlines_s={"code": 0.1}) as one:
        await asyncio.gather(*map(one.stream, requests(12)))
        accepted = one.core.counters.accepted_tokens
        assert min(accepted["draft_model"], accepted["draft_model.code"]) > 20
        metrics = RouterMetrics(one.core, one.driver, one.connections)
        assert value_of(metrics.text(), "paceline_draft_pool_workers", pool="code") == 1
        streams = one.streams(4)
        await one.stop("code-0")
        await until(lambda: value_of(metrics.text(), "paceline_draft_pool_workers", pool="code") == 0)
        one.start("code-1")
        await asyncio.gather(*streams)
        assert one.core.counters.stale_sequences == 0


async def test_a_pool_of_draft_workers_has_a_deadline_of_its_own() -> None:
    async with cluster(pool_deadlines_s={"code": 5.0}) as one:
        one.workers["code-0"].engine.before = stalls(0.3, every=2)
        await asyncio.gather(*map(one.stream, requests(4)))
        assert one.core.counters.accepted_tokens["draft_model.code"] > 0
        assert one.core.counters.late_drafts == 0


async def test_answers_of_the_target_that_come_too_late_repeat_and_lose_nothing() -> None:
    async with cluster(drafts=1, verify_timeout_s=0.15) as one:
        engine = one.workers["target"].engine
        engine.before = stalls(0.4, every=7)
        await asyncio.gather(*map(one.stream, requests()))
        engine.before = lambda batch: None
        assert one.core.counters.abandoned_rounds >= 2
        assert one.core.counters.stale_sequences >= 2  # each late round had been carried out


async def test_a_batch_is_sent_only_when_the_one_before_it_is_done() -> None:
    """However long the target hangs, no batches pile up that would all come too late."""
    async with cluster(verify_timeout_s=0.1) as one:
        engine = one.workers["target"].engine
        engine.before = stalls(2.0, every=3)
        num_before = engine.num_batches
        stream = asyncio.create_task(one.stream(request(4, stop_token_ids=())))
        await stream
        engine.before = lambda batch: None
        assert one.core.counters.abandoned_rounds <= 3
        assert engine.num_batches - num_before <= 8


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_request_that_the_target_cannot_carry_out_fails_alone(hangs: bool) -> None:
    async with cluster(drafts=1, verify_timeout_s=0.2) as one:
        guilty = request(50, 17, stop_token_ids=())
        marker = guilty.prompt_token_ids[:8].tobytes()
        fatal: set[int] = set()

        def poison(batch: VerifyBatch) -> None:
            for item in batch.items:
                if item.delta.start == 0 and item.delta.token_ids.tobytes().startswith(marker):
                    fatal.add(item.delta.seq_id)
                if item.delta.seq_id in fatal and item.delta.start + len(item.delta.token_ids) >= 20:
                    if hangs:
                        time.sleep(0.4)
                    else:
                        raise RuntimeError("a bug")

        one.workers["target"].engine.before = poison
        streams = one.streams(6, 60)
        with pytest.raises(ModelError, match="in a row"):
            await one.stream(guilty)
        await asyncio.gather(*streams)
        assert one.core.counters.abandoned_rounds == 4


async def test_a_draft_worker_that_is_late_is_left_out_of_the_round() -> None:
    async with cluster(drafts=2) as one:
        one.workers["draft-0"].engine.before = stalls(0.3, every=2)
        await asyncio.gather(*map(one.stream, requests()))
        assert one.core.counters.late_drafts >= 1


async def test_draft_workers_come_and_go_in_the_middle_of_streams() -> None:
    async with cluster(drafts=1) as one:
        streams = [asyncio.create_task(one.stream(request(200, stop_token_ids=()))) for _ in range(6)]
        await until(lambda: one.core.counters.emitted_tokens > 50)
        one.start("draft-1")
        await until(lambda: len(one.connections.draft_links()) == 2)
        await one.stop("draft-0")
        await until(lambda: len(one.connections.draft_links()) == 1)
        await one.stop("draft-1")
        await until(lambda: not one.connections.draft_links())
        one.start("draft-2")
        await asyncio.gather(*streams)
        assert one.core.counters.drafted_tokens["draft_model"] > 0


async def test_a_draft_worker_that_leaves_is_asked_for_nothing_more_and_no_draft_is_lost() -> None:
    async with cluster(drafts=2) as one:
        streams = one.streams(6)
        await until(lambda: all(one.workers[f"draft-{index}"].engine.num_batches > 5 for index in range(2)))
        leaving = one.workers["draft-0"]
        one.listed = [replace(entry, is_leaving=entry is leaving.entry) for entry in one.listed]
        await until(lambda: list(one.driver._drafts.links) == ["draft-1"])
        num_rounds = one.core.counters.rounds
        await until(lambda: one.core.counters.rounds > num_rounds + 2 or all(stream.done() for stream in streams))
        num_batches = leaving.engine.num_batches
        await asyncio.gather(*streams)
        assert leaving.engine.num_batches == num_batches
        leaving.engine.sequences.clear()  # what it held goes with it


async def test_a_target_is_there_only_when_a_first_token_has_come_out_of_it() -> None:
    async with cluster() as one:
        await one.lose_target()
        asked, let_go = threading.Event(), threading.Event()
        failures = itertools.count()

        def hang_then_fail(batch: VerifyBatch) -> None:
            asked.set()
            let_go.wait()
            if batch.items and next(failures) == 0:
                raise RuntimeError("a bug")

        one.start().engine.before = hang_then_fail
        await until(asked.is_set)
        assert not one.status.ready
        let_go.set()
        await until(lambda: one.status.ready)
        assert next(failures) >= 2  # it took a second try
        await one.stream(request())


async def test_rounds_that_stand_still_are_seen_while_their_loop_is_blocked() -> None:
    async with cluster(verify_timeout_s=0.3) as one:
        one.driver.watch.close()
        one.driver.watch = RoundWatch(one.driver, grace_s=0.2, period_s=0.02)
        stream = asyncio.create_task(one.stream(request(200, stop_token_ids=())))
        await until(lambda: one.core.counters.emitted_tokens > 10)
        deadline = time.monotonic() + PATIENCE_S
        while not one.driver.watch.stalled_s:
            assert time.monotonic() < deadline
            time.sleep(0.01)  # noqa: ASYNC251  # the loop's own thread
        status = one.status
        assert not status.live
        assert not status.ready
        assert "stood still" in status.detail
        await until(lambda: one.driver.failure is None)
        await stream


async def test_a_new_target_in_the_middle_of_a_round_takes_the_streams_over() -> None:
    async with cluster(drafts=1) as one:
        streams = one.streams(5, 100)
        await until(lambda: one.core.counters.emitted_tokens > 40)
        old = one.workers["target"]
        hung, let_go = blocked(old.engine)
        await asyncio.to_thread(hung.wait)
        one.start("target")  # it takes the place of the old one, which still holds a round
        await asyncio.gather(*streams)
        let_go.set()
        await asyncio.to_thread(old.stop)
        assert one.core.counters.targets_lost == 1


async def test_a_new_target_with_less_memory_takes_shorter_requests() -> None:
    async with cluster() as one:
        assert one.status.max_model_len == 256
        await one.stop("target")
        one.start("target", max_model_len=64)
        await until(lambda: one.status.max_model_len == 64)
        with pytest.raises(InvalidRequest, match="at most 63 tokens"):
            await one.stream(request(num_prompt=64))


@pytest.mark.parametrize("successor", ["target", "target-2"])
async def test_a_target_that_dies_in_the_middle_of_a_round_is_waited_for(successor: str) -> None:
    async with cluster() as one:
        streams = one.streams(4, 100)
        await until(lambda: one.core.counters.emitted_tokens > 20)
        await one.lose_target()
        await asyncio.sleep(0.2)  # the round that was under way is given up
        seconds = one.driver.router_seconds
        rounds = one.core.counters.abandoned_rounds
        await asyncio.sleep(0.5)
        assert one.driver.router_seconds == seconds  # no rounds, no spinning
        assert one.core.counters.abandoned_rounds == rounds <= 1
        assert not any(stream.done() for stream in streams)
        one.start(successor)
        await asyncio.gather(*streams)
        assert one.core.counters.targets_lost == 1


async def test_streams_go_on_with_another_target_group_that_the_directory_names() -> None:
    async with cluster(drafts=1) as one:
        one.workers["target"].engine.before = lambda batch: time.sleep(0.05)
        streams = await one.begun(*(request(200) for _ in range(4)), chunks=8)
        second = one.start("target-2")
        one.claim = lambda found: "target-2"
        await asyncio.gather(*streams)
        assert second.engine.num_batches > 1
        assert one.connections.target_id == "target-2"
        assert one.core.counters.targets_lost == 0  # the first one is there, for another router
        await one.stop("target")  # it holds what nobody has told it to free


async def test_a_router_without_a_group_ends_its_streams_for_others_to_go_on_and_takes_the_next_group() -> None:
    async with cluster(drafts=1, max_running=2) as one:
        one.workers["target"].engine.before = lambda batch: time.sleep(0.1)
        streams = await one.begun(*(request(250) for _ in range(4)))  # two of them wait
        one.claim = lambda found: None  # somebody else has it
        for stream in streams:
            with pytest.raises(RouterLost, match="target group is gone"):
                await stream
        assert one.connections.is_standby
        status = one.status
        assert (status.ready, status.live, status.detail) == (False, True, "standing by for a target group")
        await until(lambda: not one.core.num_running and not one.core.num_waiting)
        await one.stop("target")
        one.start("target-2")
        one.claim = lambda found: found
        await one.stream(request(20))
        assert not one.connections.is_standby
        assert one.core.counters.targets_lost == 0


async def test_a_group_that_leaves_is_used_until_gateways_know() -> None:
    async with cluster() as one:
        one.workers["target"].engine.before = lambda batch: time.sleep(0.05)
        other = one.start("target-2")
        (stream,) = await one.begun(request(250))
        one.claim = lambda found: None
        one.listed = [replace(one.workers["target"].entry, is_leaving=True), other.entry]
        await until(lambda: one.connections.is_leaving)
        assert not one.status.ready
        num_steps = one.driver.num_steps
        await until(lambda: one.driver.num_steps > num_steps + 5)  # rounds go on
        one.clock.now += 60.0
        with pytest.raises(RouterLost):
            await stream
        assert one.connections.is_standby
        await one.stop("target")
        one.claim = lambda found: found
        await one.stream(request(20))
        assert one.core.counters.targets_lost == 0


async def test_a_lost_group_is_counted_once_whether_its_router_gets_another_one_or_not() -> None:
    async with cluster() as one:
        one.start("target-2")
        one.claim = lambda found: None  # somebody else has it
        await one.stop("target")
        await until(lambda: one.connections.is_standby)
        await until(lambda: one.core.counters.targets_lost == 1)
        one.claim = lambda found: found
        await one.stream(request(20))
        assert one.core.counters.targets_lost == 1


async def test_the_only_group_is_kept_whatever_the_directory_says() -> None:
    async with cluster() as one:
        one.workers["target"].engine.before = lambda batch: time.sleep(0.02)
        (stream,) = await one.begun(request(100))
        one.claim = lambda found: None
        one.listed = [replace(one.workers["target"].entry, is_leaving=True)]  # there is no other
        await asyncio.sleep(0.6)
        one.listed = []  # a directory that has just been started
        await stream
        assert one.status.ready


async def test_the_same_target_behind_a_new_link_goes_on_where_it_was() -> None:
    async with cluster() as one:
        streams = one.streams(4)
        await until(lambda: one.core.counters.emitted_tokens > 40)
        _, link = one.connections.target or pytest.fail("no target")
        link.close()  # as after a lost connection, in the middle of a round
        one.connections._close("target")
        await asyncio.gather(*streams)
        assert one.core.counters.targets_lost == 0
        assert one.core.counters.abandoned_rounds <= 1


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_deadline_counts_while_the_target_is_missing_or_hangs(is_there: bool) -> None:
    async with cluster() as one:
        engine = one.workers["target"].engine
        num_before = engine.num_batches
        engine.before = lambda batch: time.sleep(1.5)
        if not is_there:
            await one.lose_target()
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await one.stream(request(timeout_s=0.2))
        assert time.monotonic() - started < 5.0
        assert engine.num_batches == num_before  # still in its first one, if any
        engine.before = lambda batch: None
        if not is_there:
            one.start("target")


async def test_a_client_that_closes_its_stream_frees_the_sequence_and_disturbs_nobody() -> None:
    async with cluster(drafts=1) as one:
        others = one.streams(3, 150)
        chunks = one.driver.generate(request(200, stop_token_ids=()))
        await anext(chunks)
        assert one.core.num_running == 4
        await chunks.aclose()
        await until(lambda: one.core.num_running <= 3)
        await asyncio.gather(*others)


async def test_a_client_that_leaves_while_there_is_no_target_leaves_nothing_behind() -> None:
    async with cluster() as one:
        await one.lose_target()  # or a batch may still go out, and be told of to the next one
        stream = asyncio.create_task(one.stream(request()))
        await until(lambda: bool(one.driver._streams))
        stream.cancel()
        await until(lambda: not one.core.has_work)
        one.start("target")


async def test_a_request_id_in_use_is_refused_and_its_first_stream_goes_on() -> None:
    async with cluster() as one:
        first = request(200, stop_token_ids=())
        stream = asyncio.create_task(one.stream(first))
        await until(lambda: one.core.num_running == 1)
        with pytest.raises(InvalidRequest, match="request_id"):
            await one.stream(first)
        await stream


async def test_draining_takes_no_requests_and_lets_the_open_ones_finish() -> None:
    async with cluster() as one:
        streams = one.streams(3, 60)
        await until(lambda: one.core.num_running == 3)
        assert one.status.ready
        draining = asyncio.create_task(one.driver.drain(PATIENCE_S))
        await asyncio.sleep(0)
        status = one.status
        assert (status.ready, status.live, status.detail) == (False, True, "draining")
        with pytest.raises(Unavailable, match="draining"):
            await one.stream(request())
        await draining
        assert not one.driver._streams
        await asyncio.gather(*streams)


async def test_a_drain_that_takes_too_long_ends_and_closing_ends_the_streams() -> None:
    async with cluster(survives=False) as one:
        await one.lose_target()
        stream = asyncio.create_task(one.stream(request()))
        await until(lambda: bool(one.driver._streams))
        await one.driver.drain(0.1)
        one.driver.close()
        with pytest.raises(Unavailable):
            await stream
        with pytest.raises(Unavailable):
            await one.stream(request())


class SlowGrammars:
    """Grammars that take as long to compile as a test wants."""

    def __init__(self) -> None:
        self.num_entered = 0
        self.entered: list[str] = []
        self.may_end = threading.Event()

    def known_matcher(self, text: str, field: str) -> object:
        return object() if text == "known" else None

    def matcher(self, text: str, field: str) -> object:
        self.num_entered += 1
        self.entered.append(text)
        assert self.may_end.wait(PATIENCE_S)
        if text == "bad":
            raise InvalidRequest(field, "this grammar", "it cannot be compiled")
        return object()


def constrained(text: str = "good") -> GenerationRequest:
    return msgspec.structs.replace(request(), grammar=text, grammar_field="response_format")


async def test_rounds_go_on_while_grammars_compile_and_only_so_many_wait() -> None:
    async with cluster() as one:
        grammars = one.driver._grammars = SlowGrammars()
        waiting = [asyncio.create_task(one.stream(constrained("bad"))) for _ in range(64)]
        await until(lambda: grammars.num_entered == 2)  # threads
        with pytest.raises(Overloaded, match="64 grammars wait"):
            await one.stream(constrained())
        await one.stream(request())
        waiting.pop().cancel()
        await until(lambda: one.driver._compiling.total() == 63)
        grammars.may_end.set()
        for stream in waiting:
            with pytest.raises(InvalidRequest, match=r"response_format .* cannot be compiled"):
                await stream
        assert one.driver._compiling.total() == 0


async def test_tenants_take_turns_to_have_grammars_compiled_and_known_ones_do_not_wait() -> None:
    async with cluster() as one:
        grammars = one.driver._grammars = SlowGrammars()

        def ask(text: str, tenant: str) -> asyncio.Task[object]:
            asked = msgspec.structs.replace(constrained(text), tenant=tenant)
            return asyncio.create_task(one.driver._compiled(asked))

        eager = [ask(f"eager {count}", "eager") for count in range(16)]
        await until(lambda: grammars.num_entered == 2)
        others = [ask("first", "other"), ask("second", "other"), ask("third", "third")]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="16 grammars of this tenant wait"):
            await ask("more", "eager")
        assert await asyncio.wait_for(ask("known", "eager"), PATIENCE_S) is not None
        eager.pop(2).cancel()  # it waits
        grammars.may_end.set()
        await asyncio.gather(*eager, *others)
        assert {"first", "third"} < set(grammars.entered[2:6])
        assert grammars.entered.index("second") < 8
        await one.stream(request())


@pytest.mark.parametrize("ends", ["drain", "close", "standby"])
async def test_a_router_that_leaves_meanwhile_takes_no_request_whose_grammar_is_compiled(ends: str) -> None:
    async with cluster(survives=False) as one:
        grammars = one.driver._grammars = SlowGrammars()
        stream, *others = [asyncio.create_task(one.stream(constrained())) for _ in range(4)]
        await until(lambda: grammars.num_entered == 2)
        draining = asyncio.create_task(one.driver.drain(PATIENCE_S)) if ends == "drain" else None
        if ends == "close":
            one.driver.close()
        if ends == "standby":
            one.driver.is_standby = True
        await asyncio.sleep(0.1)
        assert draining is None or not draining.done()
        grammars.may_end.set()
        for task in (stream, *others):
            with pytest.raises(Unavailable):
                await asyncio.wait_for(task, PATIENCE_S)
        if draining is not None:
            await draining
        assert not one.core.has_work


async def test_a_router_without_grammars_says_so() -> None:
    async with cluster() as one:
        with pytest.raises(InvalidRequest, match=r"response_format .* compiles no grammars"):
            await one.stream(constrained())


async def test_rounds_that_break_end_every_stream_at_once() -> None:
    async with cluster(survives=False) as one:
        stream = asyncio.create_task(one.stream(request(200, stop_token_ids=())))
        await until(lambda: one.core.counters.rounds > 3)

        def plan_round(now: float) -> None:
            raise RuntimeError("a bug")

        one.core.plan_round = plan_round  # type: ignore[assignment, method-assign]
        await until(lambda: one.driver.failure is not None)
        with pytest.raises(Unavailable, match="no rounds"):
            await asyncio.wait_for(stream, PATIENCE_S)
        with pytest.raises(Unavailable, match="no rounds"):
            await one.stream(request())
        await one.driver.drain(PATIENCE_S)  # returns at once


async def test_a_target_that_is_busy_does_not_hold_up_the_other_links() -> None:
    async with cluster() as one:
        entered, let_go = blocked(one.workers["target"].engine)
        stream = asyncio.create_task(one.stream(request(5)))
        try:
            await until(entered.is_set)
            one.connections._close("target")  # and is greeted anew
            await until(lambda: any(link.is_alive for link in one.connections.links()))
            started = time.monotonic()
            one.start("draft-0")
            await until(lambda: len(one.connections.draft_links()) == 1)
            assert time.monotonic() - started < 3.0
            assert one.connections.target is None
        finally:
            let_go.set()
        await stream


async def test_a_directory_that_does_not_answer_leaves_links_and_streams_as_they_are() -> None:
    async with cluster(drafts=1) as one:
        listed = one.list_workers

        async def fail() -> list[WorkerEntry]:
            raise RuntimeError("away")

        one.following.cancel()
        one.following = asyncio.create_task(keep_connected(one.connections, fail, one.follow))
        await asyncio.gather(*map(one.stream, requests()))
        one.listed = []  # it comes back and knows nobody yet
        one.following.cancel()
        one.following = asyncio.create_task(keep_connected(one.connections, listed, one.follow))
        await asyncio.gather(*map(one.stream, requests()))
        assert one.core.counters.abandoned_rounds == 0


async def test_drops_of_links_are_counted_on_both_ends_and_never_fall() -> None:
    async with cluster(drafts=1) as one:
        metrics = RouterMetrics(one.core, one.driver, one.connections)

        def told(worker_id: str, reason: str, count: int) -> None:
            one.listed = [
                replace(entry, link_drops=((reason, count),)) if entry.worker_id == worker_id else entry
                for entry in one.listed
            ]

        def shown(end: str, reason: str) -> float:
            start = f'paceline_link_errors_total{{end="{end}",reason="{reason}"}} '
            found = [line for line in metrics.text().splitlines() if line.startswith(start)]
            return float(found[0].removeprefix(start)) if found else 0.0

        _, link = one.connections.target or pytest.fail("no target")
        link.stats.drop("garbage")
        assert shown("router", "garbage") == 1
        told("target", "unauthenticated", 2)
        told("draft-0", "unauthenticated", 3)
        await until(lambda: shown("worker", "unauthenticated") == 5)
        await one.stop("draft-0")
        await one.stop("target")
        await until(lambda: not one.connections.links())
        assert (shown("router", "garbage"), shown("worker", "unauthenticated")) == (1, 5)
        one.start("target")
        await until(lambda: one.driver.has_target)
        told("target", "unauthenticated", 4)
        await until(lambda: shown("worker", "unauthenticated") == 9)
        await one.stream(request())


async def test_random_faults_of_everything_at_once_change_no_token() -> None:
    chance = random.Random(5)
    async with cluster(drafts=2, verify_timeout_s=0.3, max_running=4) as one:
        busy = True

        async def disturb() -> None:
            number = itertools.count(2)
            while busy:
                await asyncio.sleep(chance.uniform(0.05, 0.3))
                fault = chance.randrange(4)
                if fault == 0:
                    await one.stop("target")
                    one.start("target")
                elif fault == 1:
                    drafts = [worker_id for worker_id in one.workers if worker_id != "target"]
                    if drafts:
                        await one.stop(chance.choice(drafts))
                    one.start(f"draft-{next(number)}")
                elif fault == 2:
                    one.workers["target"].engine.before = stalls(0.4, every=chance.randint(5, 20))
                elif one.connections.target is not None:
                    one.connections.target[1].close()
                    one.connections._close("target")

        async def ask(index: int) -> None:
            wanted = request(chance.choice([3, 40, 120]), chance.choice([1, 9, 60]))
            await asyncio.sleep(0.05 * index)
            if index % 5 == 4:
                chunks = one.driver.generate(wanted)
                await anext(chunks)
                await chunks.aclose()
            else:
                try:
                    await one.stream(wanted)
                except PacelineError as error:
                    pytest.fail(f"{wanted.request_id}: {error!r}")

        disturbing = asyncio.create_task(disturb())
        await asyncio.gather(*map(ask, range(25)))
        busy = False
        await disturbing
        one.workers["target"].engine.before = lambda batch: None
        await until(lambda: one.driver.has_target)
