"""Routers follow the directory by what has changed: as a state machine, and who is woken by what."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.links.keys import LinkAddress, LinkKeys
from actors.workers.demand import DraftDemand, TargetDemand
from actors.workers.directory import Asked, Directory, Role, Told, WorkerEntry
from cluster.router.directory_view import DirectoryView
from paceline_testing.clock import Clock

KEYS = LinkKeys.generate()
TTL_S = 4.0


def entry_of(worker_id: str, role: Role = "draft", incarnation: int = 1, model: str = "m") -> WorkerEntry:
    return WorkerEntry(role, worker_id, LinkAddress("tcp://127.0.0.1:1000", KEYS.public), incarnation, model=model)


def asked(router_id: str, view: DirectoryView, **more: object) -> Asked:
    return Asked(**{"router_id": router_id, "model": "m", "held": view.target_id, "mark": view.mark, **more})  # type: ignore[arg-type]


class Followers(RuleBasedStateMachine):
    """Workers come, go, change and fall silent; the directory is made anew; answers to routers are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.directory = Directory(KEYS, TTL_S, self.clock)
        self.views = {"r1": DirectoryView(), "r2": DirectoryView()}

    @rule(number=st.integers(0, 9), incarnation=st.integers(1, 2), drops=st.integers(0, 1), leaves=st.booleans())
    def heartbeat(self, number: int, incarnation: int, drops: int, leaves: bool) -> None:
        entry = entry_of(f"w{number}", "target" if number < 4 else "draft", incarnation)
        self.directory.heartbeat(replace(entry, link_drops=(("garbage", drops),), is_leaving=leaves))

    @rule(number=st.integers(0, 9), incarnation=st.integers(1, 2))
    def remove(self, number: int, incarnation: int) -> None:
        self.directory.remove(f"w{number}", incarnation)

    @rule(seconds=st.sampled_from((0.5, 3.0, 6.0)))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(is_restarted=st.booleans())
    def make_anew(self, is_restarted: bool) -> None:
        self.directory = Directory(KEYS, TTL_S, self.clock, is_restarted=is_restarted)

    @rule(router_id=st.sampled_from(("r1", "r2")), is_lost=st.booleans())
    def ask(self, router_id: str, is_lost: bool) -> None:
        view = self.views[router_id]
        held = view.target_id
        told = self.directory.tell(asked(router_id, view))
        if is_lost:
            return
        view.take(told)
        known = {entry.worker_id: entry for entry in view.entries}
        live = {entry.worker_id: entry for entry in self.directory.workers()}
        assert {name: entry for name, entry in known.items() if entry.role == "draft"} == {
            name: entry for name, entry in live.items() if entry.role == "draft"
        }
        own = {name for name in (held, view.target_id) if name in live}
        assert {name: known[name] for name in own} == {name: live[name] for name in own}
        serving = {name for name, entry in live.items() if entry.role == "target" and not entry.is_leaving}
        assert bool(serving - own) == any(
            entry.role == "target" and not entry.is_leaving and name not in own for name, entry in known.items()
        )
        assert self.directory.tell(asked(router_id, view)).mark == view.mark or view.target_id != held

    @invariant()
    def views_are_small(self) -> None:
        for view in self.views.values():
            assert sum(entry.role == "target" for entry in view.entries) <= 3


TestFollowers = Followers.TestCase
TestFollowers.settings = settings(max_examples=30, stateful_step_count=30)


def test_an_answer_holds_what_has_changed_and_nothing_else() -> None:
    clock = Clock()
    directory, view = Directory(KEYS, TTL_S, clock), DirectoryView()
    for number in range(200):
        directory.heartbeat(entry_of(f"d{number}"))
        directory.heartbeat(entry_of(f"t{number}", "target"))
    view.take(directory.tell(asked("r", view)))
    view.take(directory.tell(asked("r", view)))  # now it is known to have its group
    directory.heartbeat(replace(entry_of("d7"), is_leaving=True))
    directory.heartbeat(replace(entry_of("t150", "target"), is_leaving=True))
    directory.remove("d8", 1)
    told = directory.tell(asked("r", view))
    assert ([entry.worker_id for entry in told.drafts], told.gone, told.is_whole) == (["d7"], ["d8"], False)
    assert len(told.targets) == 2  # its own, and one that another router may have


def test_a_router_that_leaves_gives_its_group_away_and_uses_it_until_it_goes() -> None:
    directory, view = Directory(KEYS, TTL_S, Clock()), DirectoryView()
    directory.heartbeat(entry_of("a", "target"))
    view.take(directory.tell(asked("old", view)))
    assert directory.tell(asked("old", view, is_leaving=True)).target_id == "a"
    assert directory.tell(Asked(router_id="new", model="m")).target_id == "a"
    assert directory.tell(asked("old", view, is_leaving=True)).target_id == "a"
    directory.heartbeat(replace(entry_of("a", "target"), is_leaving=True))
    assert directory.tell(asked("old", view, is_leaving=True)).target_id is None


def test_a_question_brings_the_routers_demand() -> None:
    directory = Directory(KEYS, TTL_S, Clock())
    directory.tell(Asked(router_id="r", model="m", drafts={"draft": DraftDemand(gain=0.5)}, targets=TargetDemand(3.0)))
    assert (directory.draft_demand().gain, directory.target_demand().queue_s) == (0.5, 3.0)


async def woken_by(happens: Callable[[Directory], object], routers: dict[str, str | None]) -> set[str]:
    """Which of the waiting routers (with their groups) are woken: the others wait for longer."""
    directory = Directory(KEYS, TTL_S, Clock())
    for worker_id in ("a", "b"):
        directory.heartbeat(entry_of(worker_id, "target"))
    directory.heartbeat(entry_of("d"))
    waiting: dict[str, Awaitable[Told | None]] = {}
    for router_id, model in routers.items():
        view = DirectoryView()
        for _ in range(2):
            view.take(directory.tell(asked(router_id, view, model=model)))
        waiting[router_id] = asyncio.ensure_future(directory.follow(asked(router_id, view, model=model)))
    await asyncio.sleep(0)
    happens(directory)
    await asyncio.sleep(0.01)
    woken = {router_id for router_id, call in waiting.items() if call.done()}  # type: ignore[attr-defined]
    for call in waiting.values():
        call.cancel()  # type: ignore[attr-defined]
    return woken


async def test_routers_are_woken_by_what_concerns_them() -> None:
    def beat(role: Role, worker_id: str, **fields: object) -> Callable[[Directory], object]:
        return lambda directory: directory.heartbeat(replace(entry_of(worker_id, role), **fields))

    paired = {"r1": "m", "r2": "m"}  # they have a and b
    crowd = {**paired, "x": "other", "s1": "m", "s2": "m"}
    assert await woken_by(beat("target", "a"), crowd) == set()
    assert await woken_by(beat("target", "a", link_drops=(("garbage", 1),)), crowd) == set()
    assert await woken_by(beat("target", "a", is_leaving=True), crowd) == {"r1"}
    assert await woken_by(lambda directory: directory.remove("b", 1), crowd) == {"r2"}
    assert await woken_by(beat("target", "c"), crowd) == {"s1"}
    assert await woken_by(beat("target", "c"), paired) == set()
    assert await woken_by(lambda directory: directory.release_target("r1"), crowd) == {"r1", "s1"}
    assert await woken_by(beat("draft", "d", link_drops=(("garbage", 1),)), crowd) == set()
    assert await woken_by(beat("draft", "e"), crowd) == set(crowd)
    assert await woken_by(lambda directory: directory.remove("d", 1), crowd) == set(crowd)


async def test_a_router_has_one_call_that_waits() -> None:
    directory, view = Directory(KEYS, TTL_S, Clock()), DirectoryView()
    view.take(directory.tell(asked("r", view)))
    first = asyncio.ensure_future(directory.follow(asked("r", view)))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(directory.follow(asked("r", view)))
    await asyncio.sleep(0.01)
    assert first.done()
    assert not second.done()
    second.cancel()


async def test_routers_count_as_callers_whether_or_not_they_wait() -> None:
    """Else each change of a draft worker, which wakes all of them, would have them call more often for a moment."""
    clock, calls = Clock(), []
    directory = Directory(KEYS, TTL_S, clock)
    clock.now += TTL_S
    for _ in range(2):  # the first question is answered at once
        for number in range(1000):
            told = directory.tell(Asked(router_id=f"r{number}", model="m"))
            asks = Asked(router_id=f"r{number}", model="m", mark=told.mark)
            calls.append(asyncio.ensure_future(directory.follow(asks)))
        await asyncio.sleep(0)
    longest_wait_s = directory.tell(Asked(router_id="r0", model="m")).longest_wait_s
    assert longest_wait_s == 2.0
    directory.heartbeat(entry_of("d"))
    assert directory.tell(Asked(router_id="r0", model="m")).longest_wait_s == longest_wait_s
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_counts_of_drops_are_told_when_the_call_has_waited() -> None:
    """Else a worker that drops something every second would have all routers call as often as they may."""
    directory, view = Directory(KEYS, TTL_S, Clock()), DirectoryView()
    directory.heartbeat(entry_of("d"))
    view.take(directory.tell(asked("r", view)))
    dropped = replace(entry_of("d"), link_drops=(("garbage", 1),))
    directory.heartbeat(dropped)
    call = asyncio.ensure_future(directory.follow(asked("r", view)))
    await asyncio.sleep(0.01)
    assert not call.done()
    directory.heartbeat(replace(dropped, is_leaving=True))
    told = await call
    assert told is not None
    view.take(told)
    assert view.entries == [dropped]  # as it was asked
    told = await directory.follow(asked("r", view))  # at once
    assert told is not None
    view.take(told)
    assert view.entries == [replace(dropped, is_leaving=True)]
