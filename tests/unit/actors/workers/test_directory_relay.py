"""Relays: callers learn by them what the directory itself would tell, and lose nothing with one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import Unavailable
from actors.links.keys import LinkAddress, LinkKeys
from actors.workers.directory import Asked, Directory, HeartbeatAnswer, Relayed, Role, WorkerEntry
from actors.workers.directory_relay import Relay
from cluster.router.directory_view import DirectoryView
from paceline_testing.clock import Clock

KEYS = LinkKeys.generate()
SOON_S = 0.6  # a few times as long as a relay takes to tell something; a wait without news takes a second


def entry_of(worker_id: str, role: Role = "target", incarnation: int = 1) -> WorkerEntry:
    return WorkerEntry(role, worker_id, LinkAddress("tcp://127.0.0.1:1000", KEYS.public), incarnation)


def asked_by(router_id: str, view: DirectoryView, *, is_leaving: bool = False) -> Asked:
    return Asked(router_id=router_id, model="", held=view.target_id, mark=view.mark, is_leaving=is_leaving)


@contextlib.asynccontextmanager
async def relay_of(directory: Directory, name: str = "relay-0") -> AsyncIterator[Relay]:
    async def exchange(entries: list[WorkerEntry], questions: list[Asked]) -> Relayed:
        await asyncio.sleep(0)
        return directory.relayed(name, entries, questions)

    relay = Relay(exchange)
    running = asyncio.create_task(relay.run())
    try:
        yield relay
    finally:
        running.cancel()


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
    clock.now += 1.01
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


# --- the relay


def test_a_worker_and_a_router_at_a_relay_find_each_other():
    async def both() -> None:
        directory, view = Directory(KEYS), DirectoryView()
        async with relay_of(directory) as relay:
            answer = await relay.heartbeat(entry_of("t"))
            assert answer.clients == (KEYS.public,)
            told = await relay.follow(asked_by("r", view))
            assert told is not None
            assert (told.target_id, told.targets) == ("t", (entry_of("t"),))
        assert directory.workers() == [entry_of("t")]

    asyncio.run(both())


def test_calls_of_a_moment_are_one_call_of_the_directory():
    async def many() -> list[int]:
        sizes, directory = [], Directory(KEYS)

        async def exchange(entries: list[WorkerEntry], questions: list[Asked]) -> Relayed:
            sizes.append(len(entries) + len(questions))
            return directory.relayed("relay-0", entries, questions)

        relay = Relay(exchange)
        running = asyncio.create_task(relay.run())
        beats = [relay.heartbeat(entry_of(f"w{number}")) for number in range(100)]
        asks = [relay.follow(asked_by(f"r{number}", DirectoryView())) for number in range(100)]
        await asyncio.gather(*beats, *asks)
        running.cancel()
        return sizes

    assert asyncio.run(many()) == [200]


def change_draft(directory: Directory) -> None:
    directory.heartbeat(entry_of("d", "draft"))


def free_group(directory: Directory) -> None:
    directory.heartbeat(entry_of("t"))


def release_group(directory: Directory) -> None:
    directory.release_target("other")


def lose_draft(directory: Directory) -> None:
    directory.remove("gone", 1)


@pytest.mark.parametrize("change", [change_draft, free_group, release_group, lose_draft])
@pytest.mark.parametrize("is_in_the_meantime", [False, True])
def test_a_router_that_waits_at_a_relay_hears_of_a_change_at_once(change, is_in_the_meantime):
    async def wait() -> DirectoryView:
        directory, view = Directory(KEYS), DirectoryView()
        directory.heartbeat(entry_of("gone", "draft"))
        if change is release_group:
            directory.heartbeat(entry_of("held"))
            directory.tell(asked_by("other", DirectoryView()))
        async with relay_of(directory) as relay:
            view.take(await relay.follow(asked_by("r", view)))
            before = view.mark
            waiting = asyncio.create_task(relay.follow(asked_by("r", view)))
            if not is_in_the_meantime:
                await asyncio.sleep(0.3)
            change(directory)
            async with asyncio.timeout(SOON_S):
                told = await waiting
                if told is None:  # it is to ask again
                    told = await relay.follow(asked_by("r", view))
            view.take(told)
            assert view.mark != before
        return view

    view = asyncio.run(wait())
    assert {entry.worker_id for entry in view.entries} == {
        change_draft: {"gone", "d"},
        free_group: {"gone", "t"},
        release_group: {"gone", "held"},
        lose_draft: set(),
    }[change]


def test_a_router_without_news_waits_and_asks_no_more_than_once_a_second():
    async def wait() -> tuple[int, int]:
        directory, view, num_calls, num_news = Directory(KEYS), DirectoryView(), 0, 0
        loop = asyncio.get_running_loop()
        until = loop.time() + 2.5
        async with relay_of(directory) as relay:
            while loop.time() < until:
                told = await relay.follow(asked_by("r", view))
                num_calls += 1
                if told is not None:
                    num_news += 1
                    view.take(told)
        return num_calls, num_news

    num_calls, num_news = asyncio.run(wait())
    assert 2 <= num_calls <= 5
    assert num_news == 1


def test_a_directory_that_does_not_answer_fails_the_calls_and_the_next_ones_go_on():
    async def fail() -> None:
        directory, is_away = Directory(KEYS), True

        async def exchange(entries: list[WorkerEntry], questions: list[Asked]) -> Relayed:
            if is_away:
                await asyncio.sleep(0.1)
                raise ConnectionError("away")
            return directory.relayed("relay-0", entries, questions)

        relay = Relay(exchange)
        running = asyncio.create_task(relay.run())
        first = asyncio.create_task(relay.heartbeat(entry_of("a")))
        await asyncio.sleep(0.1)  # it is on its way
        calls = [first, relay.heartbeat(entry_of("b")), relay.follow(asked_by("r", DirectoryView()))]
        failures = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(failure) for failure in failures] == [Unavailable] * 3
        assert "away" in str(failures[0])
        is_away = False
        await relay.heartbeat(entry_of("a"))
        assert directory.workers() == [entry_of("a")]
        running.cancel()

    asyncio.run(fail())


def test_a_directory_that_hangs_fails_the_calls_before_their_callers_give_up():
    async def hang() -> float:
        async def exchange(entries: list[WorkerEntry], questions: list[Asked]) -> Relayed:
            await asyncio.sleep(60)
            raise AssertionError

        relay, loop = Relay(exchange), asyncio.get_running_loop()
        running, began = asyncio.create_task(relay.run()), loop.time()
        with pytest.raises(Unavailable):
            await relay.heartbeat(entry_of("a"))
        running.cancel()
        return loop.time() - began

    assert asyncio.run(hang()) < 1.0  # the limit of `Registration`


def test_a_caller_that_gives_up_disturbs_nobody():
    async def give_up() -> None:
        async with relay_of(Directory(KEYS)) as relay:
            calls: list[Callable[[], object]] = [
                lambda: relay.heartbeat(entry_of("a")),
                lambda: relay.follow(asked_by("r", DirectoryView())),
            ]
            for call in calls:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(call(), 0.01)
            answer = await relay.heartbeat(entry_of("b"))
            assert answer.clients == (KEYS.public,)

    asyncio.run(give_up())


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
            assert is_news == (
                known.mark is None
                or known.target_id != told.target_id
                or {entry.worker_id: replace(entry, link_drops=()) for entry in known.entries}
                != {entry.worker_id: replace(entry, link_drops=()) for entry in views[True][name].entries}
            )
            take(False, name, told)
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
