"""Which router has which target group: the directory's claims, by hand and as a state machine."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from actors.links.keys import LinkAddress, LinkKeys
from actors.workers.demand import DraftDemand, TargetDemand
from actors.workers.directory import Directory, Kept, WorkerEntry
from actors.workers.model_changes import WantedModel
from paceline_testing.clock import Clock

KEYS = LinkKeys.generate()
TTL_S = 4.0


def entry_of(worker_id: str) -> WorkerEntry:
    return WorkerEntry("target", worker_id, LinkAddress("tcp://127.0.0.1:1000", KEYS.public), 1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(clock: Clock) -> Directory:
    return Directory(KEYS, TTL_S, clock)


def beat(directory: Directory, *worker_ids: str, leaving: bool = False) -> None:
    for worker_id in worker_ids:
        directory.heartbeat(replace(entry_of(worker_id), is_leaving=leaving))


def test_each_router_gets_a_group_of_its_own_at_once_and_keeps_it(directory, clock):
    beat(directory, "a", "b")
    assert (directory.claim_target("r1", None), directory.claim_target("r2", None)) == ("a", "b")
    assert directory.claim_target("r3", None) is None
    for _ in range(10):
        clock.now += 1.0
        beat(directory, "a", "b", "c")
        assert (directory.claim_target("r2", "b"), directory.claim_target("r1", "a")) == ("b", "a")
    assert directory.claim_target("r3", None) == "c"


def test_a_group_of_another_model_is_not_claimed(directory):
    directory.heartbeat(replace(entry_of("a"), model="old"))
    directory.heartbeat(replace(entry_of("b"), model="new"))
    assert directory.claim_target("r1", None, "new") == "b"
    assert directory.claim_target("r2", None, "new") is None
    assert directory.claim_target("r2", None, "old") == "a"


def test_draft_workers_are_not_claimed(directory):
    directory.heartbeat(replace(entry_of("d"), role="draft"))
    assert directory.claim_target("r", None) is None


def test_the_group_of_a_router_that_is_silent_goes_to_another(directory, clock):
    beat(directory, "a")
    assert directory.claim_target("r1", None) == "a"
    clock.now += TTL_S
    beat(directory, "a")
    assert directory.claim_target("r2", None) is None  # exactly as old as the limit
    clock.now += 0.01
    assert directory.claim_target("r2", None) == "a"
    assert directory.claim_target("r1", "a") is None


def test_a_router_that_was_silent_for_too_long_gets_its_group_back_where_nobody_has_taken_it(directory, clock):
    beat(directory, "a", "b")
    assert (directory.claim_target("r1", None), directory.claim_target("r2", None)) == ("a", "b")
    clock.now += TTL_S + 1.0
    beat(directory, "a", "b")
    assert (directory.claim_target("r2", "b"), directory.claim_target("r1", "a")) == ("b", "a")


def test_a_group_that_leaves_is_exchanged_for_a_free_one(directory):
    beat(directory, "a", "b")
    assert directory.claim_target("r1", None) == "a"
    beat(directory, "a", leaving=True)
    assert directory.claim_target("r1", "a") == "b"
    assert directory.claim_target("r2", None) is None
    beat(directory, "b", leaving=True)
    assert directory.claim_target("r1", "b") is None


def test_a_group_that_is_released_is_free_at_once(directory):
    beat(directory, "a")
    assert directory.claim_target("r1", None) == "a"
    directory.release_target("r1")
    assert directory.claim_target("r2", None) == "a"
    directory.release_target("never heard of")


def test_after_a_restart_pairs_stay_and_nobody_else_gets_one_until_all_have_come_back(clock):
    directory = Directory(KEYS, TTL_S, clock, is_restarted=True)
    beat(directory, "b", "c")  # a has not come back yet
    assert directory.claim_target("new", None) is None
    assert (directory.claim_target("r1", "a"), directory.claim_target("r2", "b")) == ("a", "b")
    assert directory.claim_target("thief", "b") is None
    clock.now += TTL_S
    beat(directory, "b", "c")
    assert (directory.claim_target("r2", "b"), directory.claim_target("new", None)) == ("b", "c")
    assert directory.claim_target("r1", "a") is None  # it has not come back at all


def test_a_directory_made_anew_believes_those_who_hold_a_group(directory):
    beat(directory, "b")
    assert directory.claim_target("r1", "a") == "a"
    assert directory.claim_target("r2", None) == "b"  # a new cluster does not wait


def test_demand_is_the_mean_of_the_routers_that_have_a_group(directory, clock):
    assert directory.target_demand() == TargetDemand()
    clock.now += 0.25
    directory.tell_demand("r1", {}, TargetDemand(3.0, 1.0))
    directory.tell_demand("r2", {}, TargetDemand(1.0, 0.5))
    directory.tell_demand("r3", {"draft": DraftDemand(late_share=0.5), "code": DraftDemand(gain=0.1)})
    assert directory.target_demand() == TargetDemand(2.0, 0.75)
    assert directory.draft_demand() == DraftDemand(late_share=0.5)
    assert directory.draft_demand("code") == DraftDemand(gain=0.1)
    assert directory.draft_demand("prose") == DraftDemand()
    directory.tell_demand("r1", {})
    assert directory.target_demand() == TargetDemand(2.0, 0.75)  # asked for a moment ago
    clock.now += 0.25
    assert directory.target_demand() == TargetDemand(1.0, 0.5)
    clock.now += TTL_S + 0.01
    assert directory.target_demand() == TargetDemand()


def test_very_many_callers_are_told_to_call_less_often_and_what_they_hold_lasts_so_long(clock):
    directory = Directory(KEYS, TTL_S, clock)
    due = {f"w{number}": 0.0 for number in range(1600)}  # when each calls next
    num_calls = 0

    def go_on(seconds: int) -> None:
        nonlocal num_calls
        for _ in range(seconds):
            for worker_id in [worker_id for worker_id, at in due.items() if at <= clock.now]:
                due[worker_id] = clock.now + directory.heartbeat(entry_of(worker_id)).stretch
                num_calls += 1
            clock.now += 1.0
            assert len(directory.workers()) == len(due)

    go_on(8)
    num_calls = 0
    go_on(20)
    assert num_calls / 20 <= 750
    assert directory.draft_demand().stretch == directory.target_demand().stretch == 4
    for number in range(100, 1600):
        directory.remove(f"w{number}", 1)
        del due[f"w{number}"]
    go_on(8)
    num_calls = 0
    go_on(10)
    assert num_calls / 10 == 100


IDS = st.sampled_from("abcd")
ROUTERS = st.sampled_from(["r1", "r2", "r3"])


class Claims(RuleBasedStateMachine):
    """Groups and routers come, go and fall silent in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.directory = Directory(KEYS, TTL_S, self.clock)
        self.held: dict[str, str | None] = {}  # by router, what it was last told
        self.told_at: dict[str, float] = {}
        # What routers hold may be from a directory before, of whose end nobody was told.
        self.restarted_at = self.clock.now

    def live(self) -> set[str]:
        return {entry.worker_id for entry in self.directory.workers("target") if not entry.is_leaving}

    def others(self, router_id: str) -> set[str | None]:
        """What those who have spoken lately hold."""
        now = self.clock.now
        return {
            held
            for other, held in self.held.items()
            if other != router_id and held is not None and now - self.told_at[other] <= TTL_S
        }

    @rule(worker_id=IDS, leaving=st.booleans())
    def heartbeat(self, worker_id: str, leaving: bool) -> None:
        beat(self.directory, worker_id, leaving=leaving)

    @rule(worker_id=IDS)
    def remove(self, worker_id: str) -> None:
        self.directory.remove(worker_id, 1)

    @rule(seconds=st.floats(0.0, 6.0))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(router_id=ROUTERS)
    def poll(self, router_id: str) -> None:
        before, live, others = self.held.get(router_id), self.live(), self.others(router_id)
        got = self.directory.claim_target(router_id, before)
        now = self.clock.now
        settles = now - self.restarted_at < TTL_S
        assert got is None or got in live or (got == before and settles)
        if before in live and before not in others:
            assert got == before  # a pair that can stay together does
        if got is None and not settles:
            assert live <= others
        self.held[router_id], self.told_at[router_id] = got, now

    @rule(router_id=ROUTERS)
    def dies(self, router_id: str) -> None:
        self.directory.release_target(router_id)
        self.held.pop(router_id, None)

    @rule()
    def restart(self) -> None:
        self.directory = Directory(KEYS, TTL_S, self.clock, is_restarted=True)
        self.restarted_at = self.clock.now

    @invariant()
    def no_two_routers_have_one_group(self) -> None:
        now = self.clock.now
        held = [
            group
            for router_id, group in self.held.items()
            if group is not None and now - self.told_at[router_id] <= TTL_S
        ]
        assert len(held) == len(set(held))


TestClaims = Claims.TestCase
TestClaims.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_number_that_was_set_by_hand_is_told_with_the_demand_until_it_is_taken_back():
    directory = Directory(LinkKeys.generate())
    directory.hold("draft", 3)
    assert (directory.draft_demand().held, directory.target_demand().held) == (3, 0)
    directory.hold("target", 2)
    directory.hold("draft", 0)
    assert (directory.draft_demand().held, directory.target_demand().held) == (0, 2)
    directory.hold("draft", 5, "code")
    assert (directory.draft_demand("code").held, directory.draft_demand().held) == (5, 0)


def test_a_model_that_is_wanted_is_told_with_a_number_that_rises_and_refusals_are_those_of_the_last_one():
    directory = Directory(LinkKeys.generate())
    assert directory.wanted_model("draft") == WantedModel("", 0)
    first = directory.want_model("draft", "/models/a")
    directory.refuse_model("draft", "w", first.number, "not there")
    assert first.spec == "/models/a"
    assert (directory.wanted_model("draft"), directory.refusals("draft")) == (first, ["not there"])
    second = directory.want_model("draft", "")
    directory.refuse_model("draft", "w", first.number, "of the one before")
    assert (directory.wanted_model("draft"), directory.refusals("draft")) == (second, [])
    assert second.number > first.number
    assert directory.wanted_model("code") == WantedModel("", 0)


def test_a_directory_made_anew_wants_no_model_under_a_number_that_workers_have_followed():
    before, anew = Directory(LinkKeys.generate()), Directory(LinkKeys.generate())
    followed = [before.want_model("draft", name).number for name in "ab"]
    assert anew.want_model("draft", "c").number > max(followed)


def test_what_a_directory_keeps_over_a_restart_has_the_refusals():
    directory = Directory(LinkKeys.generate())
    directory.refuse_model("draft", "w", directory.want_model("draft", "a").number, "not there")
    restarted = Directory(LinkKeys.generate(), is_restarted=True)
    restarted._kept = msgspec.json.decode(msgspec.json.encode(directory._kept), type=Kept)
    assert restarted.refusals("draft") == ["not there"]


def test_one_worker_of_a_pool_at_a_time_changes_its_model_and_one_that_is_gone_keeps_no_turn():
    clock = Clock()
    directory = Directory(LinkKeys.generate(), TTL_S, clock)
    assert directory.take_turn("draft", "a")
    assert not directory.take_turn("draft", "b")
    assert directory.take_turn("code", "b")
    for _ in range(5):
        clock.now += 0.9 * TTL_S
        assert directory.take_turn("draft", "a")  # it still loads
        assert not directory.take_turn("draft", "b")
    directory.end_turn("draft", "b")  # was not its turn
    assert not directory.take_turn("draft", "b")
    directory.end_turn("draft", "a")
    assert directory.take_turn("draft", "b")
    clock.now += 1.1 * TTL_S
    assert directory.take_turn("draft", "a")


def test_after_a_restart_the_worker_that_is_changing_its_model_keeps_its_turn():
    clock = Clock()
    directory = Directory(LinkKeys.generate(), TTL_S, clock, is_restarted=True)
    assert not directory.take_turn("draft", "b")  # sooner than the one that has the turn
    assert directory.take_turn("draft", "a", is_changing=True)
    clock.now += TTL_S
    assert not directory.take_turn("draft", "b")
    assert directory.take_turn("code", "b")  # nobody has said that it is changing there
    directory.end_turn("draft", "a")
    assert directory.take_turn("draft", "b")


def test_refusals_of_workers_that_come_and_go_do_not_pile_up():
    directory = Directory(LinkKeys.generate())
    number = directory.want_model("draft", "/models/a").number
    for worker in range(1000):
        directory.refuse_model("draft", f"w{worker}", number, f"{worker} " + "x" * 10_000)
    reasons = directory.refusals("draft")
    assert len(reasons) == 64
    assert reasons[-1].startswith("999 ")
    assert max(map(len, reasons)) <= 2000


def test_a_late_heartbeat_brings_no_worker_back_that_has_left(directory, clock):
    former, later = entry_of("a"), replace(entry_of("a"), incarnation=2)
    directory.heartbeat(former)
    directory.remove("a", 1)
    directory.relayed("relay", [former], [])
    assert directory.workers() == []
    directory.heartbeat(later)
    directory.relayed("relay", [former], [])
    assert directory.workers() == [later]
    directory.remove("never there", 1)
    directory.relayed("relay", [entry_of("never there")], [])
    assert directory.workers() == [later]


def test_a_worker_that_leaves_stays_leaving_whatever_comes_late(directory):
    beat(directory, "a", leaving=True)
    directory.relayed("relay", [entry_of("a")], [])
    assert [entry.is_leaving for entry in directory.workers()] == [True]
    assert directory.claim_target("r", None) is None
