"""Rounds of a router whose classes of requests have objectives: `cluster.router.objective_scheduler`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import ObjectiveUnreachable, Overloaded
from actors.messages import Refusal, TokenChunk
from cluster.config import Objective, ObjectivesConfig, RouterConfig
from paceline_testing.rounds import serve, texts_of, toy_core, toy_info, toy_request, toy_round
from paceline_testing.toy_target import ToyTarget

INTERACTIVE, BATCH = "interactive", "batch"


def request(name, service_class=INTERACTIVE, prompt=3, tokens=8, **fields):
    token_ids = [1 + index % 40 for index in range(prompt)]
    return toy_request(name, token_ids, tokens, service_class=service_class, **fields)


def make_core(
    *requests, ttft_s=5.0, tpot_s=1.0, batch_ttft_s=None, seconds=lambda rows: 0.01 + 0.0001 * rows, **config
):
    target = ToyTarget(50, seconds=seconds)
    batch = Objective(ttft_s=batch_ttft_s, tpot_s=9.0)
    objectives = ObjectivesConfig(interactive=Objective(ttft_s=ttft_s, tpot_s=tpot_s), batch=batch)
    info = toy_info(50, step_times=[(rows, seconds(rows)) for rows in (1, 2, 4, 8, 16, 64, 256)])
    return toy_core(info, *requests, config=RouterConfig(objectives=objectives, **config)), target


def emitted(outcome):
    return [event.request_id for event in outcome.events if isinstance(event, TokenChunk) and event.token_ids]


class Clock:
    """Rounds one after the other, each as long as the target says."""

    def __init__(self, core, target):
        self.core, self.target, self.now = core, target, 0.0
        self.first_at = {}

    def run(self, count):
        """The requests that emit in each round."""
        rounds = []
        for _ in range(count):
            outcome = toy_round(self.core, self.target.verify, self.now)
            self.now += 0.0 if outcome.result is None else outcome.result.elapsed_s
            rounds.append(emitted(outcome))
            for name in rounds[-1]:
                self.first_at.setdefault(name, self.now)
        return rounds


def last_rounds(events):
    return [event.request_id for event in events if isinstance(event, TokenChunk) and event.finish_reason]


def test_batch_requests_fill_what_interactive_ones_leave_and_keep_what_was_computed_when_they_give_way():
    requests = [request(f"b{index}", BATCH, tokens=6) for index in range(2)]
    core, target = make_core(*requests, max_running=2)
    clock = Clock(core, target)
    assert clock.run(2) == [["b0", "b1"]] * 2
    for name in "xy":
        core.add(request(name, tokens=2), clock.now)
    assert clock.run(3) == [["x", "y"], ["x", "y"], ["b0", "b1"]]
    assert core.counters.preempted == core.counters.stale_sequences == 0
    answers = texts_of(serve(core, target.verify))
    assert answers["b0"] == target.complete(requests[0])[0][3:]


def test_a_round_that_would_be_too_long_for_a_stream_has_no_batch_rows():
    core, target = make_core(
        *(request(f"b{index}", BATCH, prompt=1, tokens=40) for index in range(3)), max_running=4,
        tpot_s=0.2, seconds=lambda rows: 0.1 * rows,
    )  # fmt: skip
    clock = Clock(core, target)
    clock.run(3)
    core.add(request("x", prompt=1, tokens=12), clock.now)
    rounds = clock.run(12)
    assert all("x" in names for names in rounds)
    assert clock.now - clock.first_at["x"] <= 0.2 * 11
    assert sum(map(len, rounds[1:])) > 11 + 3  # time that x has saved is theirs
    assert clock.run(1) == [["b0", "b1", "b2"]]


def test_no_round_is_sent_ahead_with_batch_rows_for_which_streams_leave_no_time():
    requests = [request(name, kind, prompt=1, tokens=40) for name, kind in (("b", BATCH), ("x", INTERACTIVE))]
    core, target = make_core(*requests, send_ahead="on")
    clock = Clock(core, target)
    clock.run(3)
    round, _ = core.plan_round(clock.now)
    core.draft_locally(round)
    core.assemble(round, {})
    assert [entry.sequence.request_id for entry in round.entries] == ["b", "x"]
    assert core.plan_ahead(round, clock.now + 60.0) is not None  # a late stream can have rounds that are shorter still
    target_s = core.step_times.seconds(2)
    for _ in range(20):
        core.step_times.observe(2, 100 * target_s)
    assert core.plan_ahead(round, clock.now + 60.0) is None


def test_a_request_whose_first_token_would_be_late_is_refused_and_told_when_to_come_back():
    core, target = make_core(ttft_s=2.0, max_running=2, seconds=lambda rows: 0.1)
    clock = Clock(core, target)

    def add(name):
        core.add(request(name, tokens=10), clock.now)

    for number in range(6):  # how long answers take is learnt
        add(f"warm {number}")
        clock.run(10)
    came = {}

    def add_many():
        for number in range(50):
            add(f"r{number}")
            came[f"r{number}"] = clock.now
            clock.run(1)

    with pytest.raises(ObjectiveUnreachable) as refusal:
        add_many()
    assert len(came) > 2
    assert core.counters.refused == 1
    assert core.counters.unreachable[INTERACTIVE] == 1
    began, retry_s = clock.now, refusal.value.retry_after_s
    assert 1.0 <= retry_s <= 3.0
    core.add(request("b", BATCH), clock.now)  # nothing is promised to it
    while clock.now < began + retry_s or came.keys() - clock.first_at:
        clock.run(1)
    assert all(clock.first_at[name] - at <= 2.0 for name, at in came.items())
    add("again")


def test_where_many_of_a_class_are_refused_fewer_of_it_are_accepted_that_may_be_late():
    core, target = make_core(ttft_s=4.0, max_running=2, max_waiting=100, seconds=lambda rows: 0.1)
    clock = Clock(core, target)

    def num_accepted(name):
        """Of 100 that come at once, each before a batch request; those before have ended."""
        count = 0
        for number in range(100):
            core.add(request(f"batch {name} {number}", BATCH, tokens=1), clock.now)
            try:
                core.add(request(f"{name} {number}", tokens=10), clock.now)
                count += 1
            except ObjectiveUnreachable:
                pass
        while clock.run(1) != [[]]:
            pass
        return count

    for number in range(6):
        core.add(request(f"warm {number}", tokens=10), clock.now)
        clock.run(10)
    counts = [num_accepted(name) for name in "abc"]
    # Two answers a second: 7 within 90 % of 4 s, and of a queue of 5 with a standard deviation of 2.2 more.
    assert counts[0] >= 2 + 6
    assert counts[1] == counts[2] <= counts[0] - 2
    for number in range(200):  # nobody is refused for a time
        core.add(request(f"alone {number}", tokens=10), clock.now)
        clock.run(11)
    assert num_accepted("d") > counts[2]


def test_answers_are_counted_by_class_and_by_whether_they_were_within_their_objectives():
    core, target = make_core(ttft_s=0.5, max_running=4, seconds=lambda rows: 0.1)
    clock = Clock(core, target)
    core.add(request("in time"), clock.now)
    clock.run(8)
    core.add(request("slow to begin", prompt=200, tokens=1), clock.now)  # alone, its prompt takes longer
    core.add(request("b", BATCH), clock.now)
    core.add(request("elsewhere begun", num_output_in_prompt=1), clock.now)
    clock.now += 1.0
    clock.run(20)
    assert core.counters.answers == {INTERACTIVE: 2, BATCH: 1}
    assert core.counters.good_answers == {INTERACTIVE: 1, BATCH: 1}


def test_a_prompt_that_is_too_long_for_its_objective_by_itself_is_served_all_the_same():
    core, target = make_core(request("long", prompt=200), ttft_s=0.5, seconds=lambda rows: 0.01 * rows)
    assert last_rounds(serve(core, target.verify)) == ["long"]


@settings(max_examples=20, deadline=None)
@given(num_late=st.integers(0, 6), num_new=st.integers(0, 6), max_running=st.integers(1, 5))
def test_batch_requests_that_are_late_take_turns_with_those_that_can_be_in_time(num_late, num_new, max_running):
    late = [request(f"late {number}", BATCH, tokens=4) for number in range(num_late)]
    core, target = make_core(*late, max_running=max_running, max_waiting=100, ttft_s=None, batch_ttft_s=50.0)
    clock = Clock(core, target)
    clock.now = 60.0
    for number in range(num_new):
        core.add(request(f"new {number}", BATCH, tokens=4), clock.now)
    number = 0
    while len([name for name in clock.first_at if name[0] in "ln"]) < num_late + num_new:
        while core.num_waiting < num_late + num_new + 8:
            core.add(request(f"x{number}", tokens=4), clock.now)
            number += 1
        clock.run(1)
        assert number < 1000
    begun = [name[0] for name in sorted(clock.first_at, key=clock.first_at.get) if name[0] in "ln"]
    for count in range(len(begun) + 1):
        first = begun[:count]
        assert first.count("l") >= min(num_late, count // 2)
        assert first.count("n") >= min(num_new, count // 2)


def test_those_who_are_refused_come_back_one_after_the_other():
    core, target = make_core(ttft_s=1.0, max_running=2, seconds=lambda rows: 0.1)
    clock = Clock(core, target)
    for number in range(6):
        core.add(request(f"warm {number}", tokens=10), clock.now)
        clock.run(10)
    told = []
    for number in range(700):
        try:
            core.add(request(f"r{number}", tokens=10), clock.now)
        except ObjectiveUnreachable as error:
            told.append(error.retry_after_s)
    assert told == sorted(told)
    assert told[400] - told[0] == pytest.approx(200, rel=0.2)  # two a second
    assert told[-1] == 300.0


def test_who_goes_to_another_router_is_expected_back_there_and_by_no_more_than_one():
    cores = [make_core(ttft_s=1.0, max_running=2, seconds=lambda rows: 0.1) for _ in range(2)]
    clocks = [Clock(*one) for one in cores]
    for clock in clocks:
        for number in range(6):
            clock.core.add(request(f"warm {number}", tokens=10), clock.now)
            clock.run(10)

    def told(clock, name, **fields):
        try:
            clock.core.add(request(name, tokens=10, **fields), clock.now)
        except ObjectiveUnreachable as error:
            return error.retry_after_s
        return None

    one, other = clocks
    for number in range(20):  # one is full, and nobody is expected back there
        told(one, f"r{number}", asks_another=True)
    first = told(one, "x", asks_another=True)
    assert first == told(one, "y", asks_another=True)
    assert one.core.counters.refused == one.core.counters.unreachable[INTERACTIVE] == 0
    # The other has room: whoever the first one has refused is taken in.
    assert told(other, "x", refusal=Refusal("one", first)) is None
    # Both are full: they come back when the sooner of the two has room, and count once.
    times = [told(other, f"z{number}", refusal=Refusal("one", first)) for number in range(20)]
    refused = [time for time in times if time is not None]
    assert len(refused) > 10
    assert max(refused) == first
    assert other.core.counters.refused == len(refused)
    alone = told(other, "w")
    assert alone > first + 0.4 * len(refused)  # two answers a second: after all of them
    assert told(one, "w", asks_another=True) == first


def test_batch_requests_do_not_fill_the_queue_of_interactive_ones():
    core, _ = make_core(max_running=1, max_waiting=2)
    for index in range(3):
        core.add(request(f"b{index}", BATCH), 0.0)
    with pytest.raises(Overloaded):
        core.add(request("b3", BATCH), 0.0)
    core.add(request("x"), 0.0)


def test_tenants_share_by_weight_whatever_they_ask_for():
    core, target = make_core(max_running=1, max_waiting=100, ttft_s=None)
    for index in range(40):
        core.add(request(f"much {index}", tenant="a"), 0.0)
    for index in range(20):
        core.add(request(f"little {index}", tenant="b", tenant_weight=3.0), 0.0)
    ended = last_rounds(serve(core, target.verify))[:20]
    assert 12 <= sum(name.startswith("little") for name in ended) <= 17


@pytest.mark.parametrize("tpot_s", [1.0, 0.001])
def test_a_batch_request_ends_however_many_interactive_ones_come(tpot_s):
    core, target = make_core(request("b", BATCH, tokens=20), max_running=2, ttft_s=None, tpot_s=tpot_s)
    ended, number = [], 0
    while "b" not in ended:
        while core.num_waiting < 4:
            core.add(request(f"x{number}", tokens=4), number * 0.01)
            number += 1
        ended += last_rounds(toy_round(core, target.verify, number * 0.01).events)
        assert number < 200


def test_short_of_kv_blocks_interactive_requests_need_not_wait_for_those_of_batch_ones():
    core, target = make_core(*(request(f"b{index}", BATCH, prompt=12, tokens=30) for index in range(2)), max_running=3)
    target.total_blocks = target.free_blocks = 12
    clock = Clock(core, target)
    clock.run(6)
    for name in "xyz":
        core.add(request(name, prompt=8, tokens=20), clock.now)
        assert any(name in names for names in clock.run(4))
    assert core.counters.preempted
    answers = texts_of(serve(core, target.verify))
    assert len(answers) == 5


def test_long_batch_answers_keep_at_most_a_quarter_of_the_places_beside_interactive_ones():
    batch = [request(f"b{index}", BATCH, tokens=200) for index in range(8)]
    core, target = make_core(*batch, max_running=8, max_waiting=100, ttft_s=None)
    clock, shares = Clock(core, target), []
    for number in range(100):
        for index in range(8):
            if core.num_waiting < 20:
                core.add(request(f"x{number}-{index}", tokens=4), clock.now)
        shares += [sum(name.startswith("b") for name in names) for names in clock.run(1)]
    assert shares[-50:] == [2] * 50


def test_who_lacks_kv_blocks_takes_them_from_batch_requests():
    core, target = make_core(max_running=4)
    target.total_blocks = target.free_blocks = 12
    core.add(request("x", prompt=12, tokens=12), 0.0)
    toy_round(core, target.verify)
    core.add(request("b", BATCH, prompt=12, tokens=12), 0.0)
    core.add(request("y", prompt=12, tokens=12), 0.0)
    assert last_rounds(serve(core, target.verify))[-1] == "b"
    assert core.counters.preempted


@settings(max_examples=25)
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from([INTERACTIVE, BATCH]), st.sampled_from("abc"), st.integers(1, 30), st.integers(1, 9)),
        max_size=25,
    ),
    max_running=st.integers(1, 4),
    ttft_s=st.sampled_from([None, 0.05, 1.0]),
    tpot_s=st.sampled_from([None, 0.001, 0.02, 1.0]),
)
def test_every_request_ends_once_with_the_targets_own_text(kinds, max_running, ttft_s, tpot_s):
    core, target = make_core(max_running=max_running, max_waiting=5, ttft_s=ttft_s, tpot_s=tpot_s, max_prefill_rows=16)
    taken, left, events = {}, list(kinds), []

    def arrive():
        for kind, tenant, prompt, tokens in [left.pop() for _ in range(min(2, len(left)))]:
            asked = request(f"r{len(left)}-{len(taken)}", kind, prompt, tokens, tenant=tenant)
            try:
                core.add(asked, len(taken) * 0.05)
            except Overloaded:
                continue
            taken[asked.request_id] = asked

    arrive()
    while left or core.has_work:
        events += serve(core, target.verify, between=arrive)
        arrive()
    assert texts_of(events) == {name: target.complete(asked)[0] for name, asked in taken.items()}
    assert sorted(last_rounds(events)) == sorted(taken)
    assert not core._scheduler.held
    assert not core._scheduler._charged
    assert not core._scheduler._kept
