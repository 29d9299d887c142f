"""Relays: callers learn by them what the directory itself would tell, and lose nothing with one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.errors import LinkError, Unavailable
from actors.links.keys import LinkAddress, LinkKeys
from actors.workers.directory import Asked, Directory, HeartbeatAnswer, Relayed, Role, WorkerEntry
from actors.workers.directory_relay import RELAY_TIMEOUT_S, Relay
from cluster.router.directory_view import DirectoryView
from paceline_testing.clock import Clock
from paceline_testing.virtual_time import run_virtually

KEYS = LinkKeys.generate()
SOON_S = 0.4  # in which a relay tells something; a wait without news takes a second


def entry_of(worker_id: str, role: Role = "target", incarnation: int = 1) -> WorkerEntry:
    return WorkerEntry(role, worker_id, LinkAddress("tcp://127.0.0.1:1000", KEYS.public), incarnation)


def asked_by(router_id: str, view: DirectoryView, *, is_leaving: bool = False) -> Asked:
    return Asked(router_id=router_id, model="", held=view.target_id, mark=view.mark, is_leaving=is_leaving)


class Upstream:
    """A directory at some distance. Its calls are taken in their order, as an actor takes them."""

    def __init__(self, directory: Directory, name: str = "relay-0", takes_s: float = 0.01) -> None:
        self.directory = directory
        self.takes_s = takes_s
        self.error: Exception | None = None
        self.sizes: list[int] = []  # of calls
        self._name = name
        self._turn = asyncio.Lock()

    async def relayed(self, entries: list[WorkerEntry], questions: list[Asked]) -> Relayed:
        return await self._do(self.directory.relayed, self._name, entries, questions)

    async def remove(self, worker_id: str, incarnation: int) -> None:
        await self._do(self.directory.remove, worker_id, incarnation)

    async def release_target(self, router_id: str) -> None:
        await self._do(self.directory.release_target, router_id)

    async def _do(self, call: Callable[..., Any], *arguments: Any) -> Any:
        async with self._turn:
            await asyncio.shield(asyncio.sleep(self.takes_s))
            if self.error is not None:
                raise self.error
            if call == self.directory.relayed:
                self.sizes.append(sum(map(len, arguments[1:])))
            return call(*arguments)


@contextlib.asynccontextmanager
async def relay_of(upstream: Upstream) -> AsyncIterator[Relay]:
    relay = Relay(upstream)
    running = asyncio.create_task(relay.run())
    try:
        yield relay
    finally:
        running.cancel()


def virtual_directory() -> Directory:
    return Directory(KEYS, 4.0, asyncio.get_running_loop().time)


# --- the directory


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(clock: Clock) -> Directory:
    return Directory(KEYS, 4.0, clock, most_callers=4)


def answers(directory: Directory, count: int) -> list[HeartbeatAnswer]:
    return [directory.heartbeat(entry_of(f"w{number}")) for number in range(count)]


def live(directory: Directory, *numbers: int) -> None:
    for number in numbers:
        directory.relayed(f"relay-{number}", [], [])


def test_few_callers_need_no_relay(directory):
    live(directory, 0, 1)
    assert {answer.relay for answer in answers(directory, 4)} == {None}


def test_many_callers_are_shared_among_relays_that_call(directory, clock):
    assert {answer.relay for answer in answers(directory, 8)} == {None}  # there are none yet
    live(directory, 1)
    assert {answer.relay for answer in answers(directory, 8)} == {None, "relay-1"}
    live(directory, 0, 1)
    named = [answer.relay for answer in answers(directory, 8)]
    assert set(named) == {"relay-0", "relay-1"}
    assert [answer.relay for answer in answers(directory, 8)] == named  # each has its own
    clock.now += 3.01
    assert {answer.relay for answer in answers(directory, 8)} == {None}  # they are silent


def test_leases_stay_as_they_are_where_callers_use_relays(directory, clock):
    entries = [entry_of(f"w{number}") for number in range(40)]
    assert [directory.heartbeat(entry) for entry in entries][-1].stretch == 16
    for _ in range(40):
        clock.now += 1.0
        told = directory.relayed("relay-0", entries, []).heartbeats
    assert told[-1].stretch == 1
    assert len(directory.workers()) == 40
    clock.now += 4.01
    assert directory.workers() == []
    assert directory.target_demand().stretch == directory.draft_demand().stretch == 1


def test_replicas_ask_for_demand_less_often_as_there_are_more_of_them(directory):
    directory.relayed("relay-0", [entry_of(f"w{number}") for number in range(40)], [])
    assert directory.target_demand().stretch == directory.draft_demand().stretch == 10


def test_a_relay_that_is_there_is_news_for_a_router():
    async def follow() -> list[str | None]:
        directory, view, relays = Directory(KEYS, most_callers=1), DirectoryView(), []
        for number in range(3):
            live(directory, *range(number))
            told = await directory.follow(asked_by("r", view))
            directory.heartbeat(entry_of("w"))
            if told is not None:
                view.take(told)
                relays.append(told.relay)
        return relays

    relays = asyncio.run(asyncio.wait_for(follow(), SOON_S))
    assert relays[0] is None
    assert relays[-1] is not None


# --- the relay, in virtual time


def test_a_worker_and_a_router_at_a_relay_find_each_other():
    async def both() -> None:
        directory, view = virtual_directory(), DirectoryView()
        async with relay_of(Upstream(directory)) as relay:
            answer = await relay.heartbeat(entry_of("t"))
            assert answer.clients == (KEYS.public,)
            told = await relay.follow(asked_by("r", view))
            assert told is not None
            assert (told.target_id, told.targets) == ("t", (entry_of("t"),))
        assert directory.workers() == [entry_of("t")]

    run_virtually(both())


def test_calls_of_a_moment_are_one_call_of_the_directory():
    async def many() -> list[int]:
        upstream = Upstream(virtual_directory())
        async with relay_of(upstream) as relay:
            beats = [relay.heartbeat(entry_of(f"w{number}")) for number in range(100)]
            asks = [relay.follow(asked_by(f"r{number}", DirectoryView())) for number in range(100)]
            await asyncio.gather(*beats, *asks)
        return upstream.sizes

    assert run_virtually(many()) == [200]


def change_draft(directory: Directory) -> None:
    directory.heartbeat(entry_of("d", "draft"))


def free_group(directory: Directory) -> None:
    directory.heartbeat(entry_of("t"))


def release_group(directory: Directory) -> None:
    directory.release_target("other")


def lose_draft(directory: Directory) -> None:
    directory.remove("gone", 1)


@pytest.mark.parametrize("change", [change_draft, free_group, release_group, lose_draft])
@pytest.mark.parametrize("after_s", [0.0, 0.055, 0.07, 0.3, 0.9])
def test_a_router_that_waits_at_a_relay_hears_of_a_change_at_once(change, after_s):
    async def wait() -> DirectoryView:
        directory, view = virtual_directory(), DirectoryView()
        directory.heartbeat(entry_of("gone", "draft"))
        if change is release_group:
            directory.heartbeat(entry_of("held"))
            directory.tell(asked_by("other", DirectoryView()))
        async with relay_of(Upstream(directory)) as relay:
            view.take(await relay.follow(asked_by("r", view)))
            waiting = asyncio.create_task(relay.follow(asked_by("r", view)))
            await asyncio.sleep(after_s)
            change(directory)
            async with asyncio.timeout(SOON_S):
                told = await waiting
                if told is None:  # it is to ask again
                    told = await relay.follow(asked_by("r", view))
            view.take(told)
        return view

    view = run_virtually(wait())
    assert {entry.worker_id for entry in view.entries} == {
        change_draft: {"gone", "d"},
        free_group: {"gone", "t"},
        release_group: {"gone", "held"},
        lose_draft: set(),
    }[change]


def test_a_router_without_news_waits_and_asks_no_more_than_once_a_second():
    async def wait() -> tuple[int, int]:
        view, num_calls, num_news = DirectoryView(), 0, 0
        loop = asyncio.get_running_loop()
        async with relay_of(Upstream(virtual_directory())) as relay:
            while loop.time() < 100.0:
                told = await relay.follow(asked_by("r", view))
                num_calls += 1
                if told is not None:
                    num_news += 1
                    view.take(told)
            assert not relay._waiting
        return num_calls, num_news

    num_calls, num_news = run_virtually(wait())
    assert 90 <= num_calls <= 101
    assert num_news == 1


def test_a_directory_that_fails_fails_the_calls_after_a_moment_and_the_next_ones_go_on():
    async def fail() -> None:
        upstream = Upstream(virtual_directory())
        upstream.error = ConnectionError("away")
        async with relay_of(upstream) as relay:
            calls = [relay.heartbeat(entry_of("b")), relay.follow(asked_by("r", DirectoryView()))]
            failures = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(failure) for failure in failures] == [Unavailable] * 2
            assert "away" in str(failures[0])
            assert asyncio.get_running_loop().time() >= 0.5
            upstream.error = None
            await relay.heartbeat(entry_of("a"))
        assert upstream.directory.workers() == [entry_of("a")]

    run_virtually(fail())


def test_callers_are_told_when_a_relay_has_long_been_without_an_answer():
    async def wait() -> None:
        upstream, loop = Upstream(virtual_directory()), asyncio.get_running_loop()
        async with relay_of(upstream) as relay:
            await relay.heartbeat(entry_of("a"))
            upstream.error = ConnectionError("away")
            began, errors = loop.time(), []
            while loop.time() < began + 10.0:
                with pytest.raises((Unavailable, LinkError)) as caught:
                    await relay.heartbeat(entry_of("a"))
                errors.append((loop.time() - began, caught.type))
            assert all(kind == (LinkError if seconds > 3.5 else Unavailable) for seconds, kind in errors)
            assert {kind for _, kind in errors} == {LinkError, Unavailable}
            upstream.error = None
            await relay.heartbeat(entry_of("a"))

    run_virtually(wait())


@pytest.mark.parametrize("after_s", [0.0, 0.1, 1.0])
def test_a_directory_that_hangs_fails_the_calls_before_their_callers_give_up(after_s):
    async def hang() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        async with relay_of(Upstream(virtual_directory(), takes_s=60.0)) as relay:
            await asyncio.sleep(after_s)
            took_s = []
            for call in (relay.heartbeat(entry_of("a")), relay.follow(asked_by("r", DirectoryView()))):
                began = loop.time()
                with pytest.raises((Unavailable, LinkError)):
                    await call
                took_s.append(loop.time() - began)
        return took_s[0], took_s[1]

    heartbeat_s, question_s = run_virtually(hang())
    assert heartbeat_s < 2.0  # the limit of `Registration`
    assert question_s < 1.0 + RELAY_TIMEOUT_S


@pytest.mark.parametrize(
    ("takes_s", "keeps_leases", "tells_workers"),
    [(0.9, True, True), (1.25, True, False), (2.0, False, True), (2.8, False, True)],
)
def test_with_a_slow_directory_routers_are_answered_and_workers_mostly(takes_s, keeps_leases, tells_workers):
    """Its calls take about as long as callers wait, or longer. A router's lease is renewed once in a second and two
    calls, and so ends before that where they take more than one and a half seconds. A worker's lease is renewed also
    where answers always come too late, as they may for workers whose calls follow those of the relay in step."""

    async def slow() -> tuple[Counter[str], list[object]]:
        loop = asyncio.get_running_loop()
        upstream, answered, lost = Upstream(virtual_directory()), Counter[str](), list[object]()

        async def router(name: str, relay: Relay) -> None:
            view = DirectoryView()
            while True:
                with contextlib.suppress(Unavailable):
                    told = await relay.follow(asked_by(name, view))
                    answered[name] += 1
                    if told is not None:
                        view.take(told)
                await asyncio.sleep(0.1)

        async def worker(name: str, relay: Relay, every_s: float) -> None:
            while True:
                with contextlib.suppress(Unavailable):
                    await relay.heartbeat(entry_of(name))
                    answered[name] += 1
                await asyncio.sleep(every_s)

        async with relay_of(upstream) as relay:
            work = [router(f"r{number}", relay) for number in range(10)]
            work += [worker(f"w{number}", relay, 1.0 + 0.01 * number) for number in range(10)]
            tasks = list(map(asyncio.create_task, work))
            await asyncio.sleep(3.0)
            before = [upstream.directory.claim_target(f"r{number}", None) for number in range(10)]
            upstream.takes_s = takes_s
            answered.clear()
            while loop.time() < 60.0:
                await asyncio.sleep(0.5)
                upstream.directory._expire()
                if len(upstream.directory._records) < 10 or len(upstream.directory._claims) < 10:
                    lost.append(loop.time())
            for task in tasks:
                assert not task.done()
                task.cancel()
            assert sorted(before, key=str) == sorted(f"w{number}" for number in range(10))
        assert max(upstream.sizes) <= 20
        return answered, lost

    answered, lost = run_virtually(slow())
    assert not (keeps_leases and lost)
    told_workers = [answered[f"w{number}"] for number in range(10)]
    assert (min if tells_workers else max)(told_workers) >= 3
    assert min(answered[f"r{number}"] for number in range(10)) > 57.0 / (1.5 + 2.0 * takes_s)


def test_the_answer_to_a_question_that_was_given_up_is_not_for_a_router_that_has_forgotten_what_it_knew():
    async def ask() -> None:
        view = DirectoryView()
        upstream = Upstream(virtual_directory())
        upstream.directory.heartbeat(entry_of("d", "draft"))
        async with relay_of(upstream) as relay:
            view.take(await relay.follow(asked_by("r", view)))
            upstream.takes_s = 1.5
            with pytest.raises(Unavailable):
                await relay.follow(asked_by("r", view))
            upstream.takes_s = 0.01
            told = await relay.follow(asked_by("r", DirectoryView()))
            assert told is not None
            assert told.is_whole

    run_virtually(ask())


def test_a_router_that_leaves_is_heard_though_its_question_before_was_given_up():
    async def leave() -> None:
        view = DirectoryView()
        upstream = Upstream(virtual_directory())
        async with relay_of(upstream) as relay:
            await relay.heartbeat(entry_of("t"))
            view.take(await relay.follow(asked_by("r", view)))
            assert view.target_id == "t"
            upstream.takes_s = 1.5
            with pytest.raises(Unavailable):
                await relay.follow(asked_by("r", view))
            upstream.takes_s = 0.01
            await relay.follow(asked_by("r", view, is_leaving=True))
        assert upstream.directory.claim_target("s", None) == "t"

    run_virtually(leave())


def test_a_router_that_waits_without_its_relay_hears_of_a_change_though_the_relay_passes_on_an_old_question():
    async def wait() -> DirectoryView:
        directory, view = virtual_directory(), DirectoryView()
        directory.heartbeat(entry_of("t"))
        view.take(await directory.follow(asked_by("r", view)))
        waiting = asyncio.create_task(directory.follow(asked_by("r", view)))
        await asyncio.sleep(0.1)
        directory.relayed("relay-0", [], [asked_by("r", view)])
        change_draft(directory)
        async with asyncio.timeout(SOON_S):
            told = await waiting
            if told is None:  # it is to ask again
                told = await directory.follow(asked_by("r", view))
        view.take(told)
        return view

    assert {entry.worker_id for entry in run_virtually(wait()).entries} == {"t", "d"}


def test_what_is_given_back_is_not_taken_again_by_a_call_that_was_on_its_way():
    async def leave() -> None:
        directory = virtual_directory()
        async with relay_of(Upstream(directory)) as relay:
            await relay.heartbeat(entry_of("t"))
            await relay.follow(asked_by("r", DirectoryView()))
            for pause_s in (0.0, 0.055):  # while it is collected; while it is passed on
                directory.claim_target("r", None)
                late = [
                    asyncio.create_task(relay.follow(asked_by("r", DirectoryView()))),
                    asyncio.create_task(relay.heartbeat(entry_of("w"))),
                ]
                await asyncio.sleep(pause_s)
                await relay.release_target("r")
                await relay.remove("w", 1)
                await asyncio.gather(*late, return_exceptions=True)
                assert directory.claim_target("s", None) == "t"
                assert directory.workers() == [entry_of("t")]
                directory.release_target("s")

    run_virtually(leave())


def test_a_caller_that_gives_up_disturbs_nobody_and_leaves_nothing():
    async def give_up() -> None:
        view = DirectoryView()
        async with relay_of(Upstream(virtual_directory())) as relay:
            view.take(await relay.follow(asked_by("r", view)))
            calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
                lambda: relay.heartbeat(entry_of("a")),
                lambda: relay.follow(asked_by("r", view)),
            ]
            for call in calls:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(call(), 0.01)
            answer = await relay.heartbeat(entry_of("b"))
            assert answer.clients == (KEYS.public,)
            assert not relay._waiting

    run_virtually(give_up())


def test_a_router_at_a_relay_that_hangs_keeps_its_group():
    """It gives the relay up, and asks the directory, before its lease ends; another router waits for the group."""

    async def hang() -> None:
        directory, loop = virtual_directory(), asyncio.get_running_loop()
        hangs, claims = asyncio.Event(), []

        async def beat() -> None:
            while True:
                directory.heartbeat(entry_of("t"))
                await asyncio.sleep(0.9)

        async def stand_by() -> None:
            while True:
                claims.append(directory.claim_target("standby", None))
                await asyncio.sleep(0.1)

        async def router(relay: Relay) -> None:
            view, uses_relay = DirectoryView(), True
            while True:
                began = loop.time()
                try:
                    async with asyncio.timeout(view.longest_wait_s + (RELAY_TIMEOUT_S if uses_relay else 5.0)):
                        if uses_relay and hangs.is_set():
                            await asyncio.sleep(60.0)
                        told = await (relay if uses_relay else directory).follow(asked_by("r", view))
                except TimeoutError:
                    uses_relay = False
                    continue
                if told is not None:
                    view.take(told)
                    assert told.target_id == "t"
                await asyncio.sleep(max(0.0, began + 0.25 - loop.time()))

        async with relay_of(Upstream(directory)) as relay:
            tasks = [asyncio.create_task(work) for work in (beat(), router(relay))]
            await asyncio.sleep(0.5)
            tasks.append(asyncio.create_task(stand_by()))
            await asyncio.sleep(5.0)
            hangs.set()
            await asyncio.sleep(20.0)
            for task in tasks:
                assert not task.done()
                task.cancel()
        assert set(claims) == {None}

    run_virtually(hang())


# --- a directory with relays against one without

NAMES = st.sampled_from(["a", "b", "c"])
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("target"), NAMES, st.booleans()),
        st.tuples(st.just("draft"), NAMES, st.booleans()),
        st.tuples(st.just("router"), NAMES, st.booleans()),
        st.tuples(st.just("remove"), NAMES, st.booleans()),
        st.tuples(st.just("release"), NAMES, st.booleans()),
        st.tuples(st.just("pass"), NAMES, st.booleans()),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@example([("router", "a", False), ("draft", "a", False), ("remove", "a", False), ("router", "a", False)], 1)
@given(ACTIONS, st.integers(1, 4))
def test_what_is_passed_on_in_batches_is_answered_as_if_each_had_called(actions, batch):
    """Batches keep the order of workers' and of routers' calls; workers come first."""
    clock = Clock()
    direct, behind = (Directory(KEYS, 4.0, clock) for _ in range(2))
    views: dict[bool, dict[str, DirectoryView]] = {True: {}, False: {}}

    def question(is_direct: bool, name: str, is_leaving: bool) -> Asked:
        return asked_by(name, views[is_direct].setdefault(name, DirectoryView()), is_leaving=is_leaving)

    def take(is_direct: bool, name: str, told: object) -> None:
        views[is_direct][name].take(told)  # type: ignore[arg-type]

    for begin in range(0, len(actions), batch):
        some = actions[begin : begin + batch]
        entries = [
            replace(entry_of(f"{kind}-{name}", kind), is_leaving=flag)
            for kind, name, flag in some
            if kind in ("target", "draft")
        ]
        routers = {name: flag for kind, name, flag in some if kind == "router"}
        for entry in entries:
            direct.heartbeat(entry)
        for name, flag in routers.items():
            take(True, name, direct.tell(question(True, name, flag)))
        questions = [question(False, name, flag) for name, flag in routers.items()]
        relayed = behind.relayed("relay-0", entries, questions)
        for name, (told, is_news) in zip(routers, relayed.told, strict=True):
            known = views[False][name]
            before = known.mark, known.target_id, {entry.worker_id: entry for entry in known.entries}
            take(False, name, told)
            after = known.mark, known.target_id, {entry.worker_id: entry for entry in known.entries}
            assert is_news or before[1:] == after[1:]
            assert is_news or before[0] is not None
        for kind, name, _ in some:
            for one in (direct, behind):
                if kind == "remove":
                    one.remove(f"draft-{name}", 1)
                    one.remove(f"target-{name}", 1)
                elif kind == "release":
                    one.release_target(name)
            clock.now += 0.7 * (kind == "pass")
        assert behind.workers() == direct.workers()
        for name in routers:
            mine, same = views[False][name], views[True][name]
            assert (mine.target_id, sorted(mine.entries, key=str)) == (same.target_id, sorted(same.entries, key=str))
