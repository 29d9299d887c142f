"""How many target groups there should be: the decision, what routers say, and Serve's own autoscaler."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from ray.exceptions import ActorUnavailableError

from actors.messages import GenerationRequest, SamplingParams
from actors.models.source import ModelSource
from actors.options import TargetGroupOptions
from actors.workers.autoscaling import AutoscalingConfig, DraftPolicy, TargetPolicy, desired_groups
from actors.workers.demand import TargetDemand
from actors.workers.demand_reader import DemandReader
from actors.workers.settings import TargetSettings
from actors.workers.target_group import TargetGroup, target_group_application
from cluster.config import ClusterConfig, RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from paceline_testing.rounds import toy_info, toy_round
from paceline_testing.serve_autoscaler import autoscaler_of, policy_context
from paceline_testing.toy_target import ToyTarget

SHARES = st.floats(0.0, 1.0)
WAITS = st.floats(0.0, 100.0)
SIGNALS = st.builds(TargetDemand, WAITS, SHARES)
LIMITS = st.builds(TargetPolicy, queue_s=st.floats(0.01, 60.0), used_share=st.floats(0.05, 0.95))
GROUPS = st.integers(1, 64)
USUAL = TargetPolicy(queue_s=1.0, used_share=0.7)


@given(SIGNALS, LIMITS, st.integers(0, 64), st.integers(1, 20), st.integers(0, 40))
def test_the_decision_stays_within_its_bounds_and_at_most_doubles(signals, limits, groups, fewest, more):
    desired = desired_groups(signals, limits, groups, fewest, fewest + more)
    assert fewest <= desired <= fewest + more
    assert desired <= max(fewest, 2 * max(1, groups))


@given(SIGNALS, SIGNALS, LIMITS, GROUPS)
def test_larger_signals_never_want_fewer_groups(one, other, limits, groups):
    def each(pick):
        return TargetDemand(pick(one.queue_s, other.queue_s), pick(one.used_share, other.used_share))

    assert desired_groups(each(min), limits, groups, 1, 999) <= desired_groups(each(max), limits, groups, 1, 999)


@given(SIGNALS, LIMITS, GROUPS, WAITS)
def test_no_decision_is_followed_by_its_opposite_while_the_same_work_runs(signals, limits, groups, queue_s):
    desired = desired_groups(signals, limits, groups, 1, 999)
    used_share = min(1.0, signals.used_share * groups / desired)
    after = desired_groups(TargetDemand(queue_s, used_share * (1 + 1e-9)), limits, desired, 1, 999)
    if desired > groups:
        assert after >= desired
    after = desired_groups(TargetDemand(queue_s, used_share * (1 - 1e-9)), limits, desired, 1, 999)
    if desired < groups:
        assert after <= desired


def test_groups_come_for_those_that_wait_and_go_where_the_others_have_room():
    def desired(queue_s, used_share, groups):
        return desired_groups(TargetDemand(queue_s, used_share), USUAL, groups, 1, 8)

    assert [desired(5.0, 1.0, groups) for groups in (1, 2, 4, 8)] == [2, 3, 6, 8]
    assert desired(5.0, 0.5, 2) == 2  # whatever they wait for, it is not room
    assert desired(0.5, 1.0, 2) == 2  # full, and nobody waits for long
    assert desired(0.0, 0.3, 2) == 1
    assert desired(0.0, 0.36, 2) == 2  # the other one would be too full
    assert desired(5.0, 0.3, 2) == 2
    assert desired(0.0, 0.0, 1) == 1


def test_serves_policy_goes_by_what_the_groups_have_recorded():
    policy = TargetPolicy(queue_s=1.0, used_share=0.7)
    assert policy(policy_context(2, 2)) == (2, {})
    assert policy(policy_context(0, 2, queue_s={"a": 9.0}, used_share={"a": 1.0})) == (2, {})
    full = {"queue_s": {"a": 3.0, "b": 3.0}, "used_share": {"a": 1.0, "b": 1.0}}
    assert policy(policy_context(2, 2, **full)) == (3, {})
    assert policy(policy_context(1, 3, **full)) == (3, {})  # two are on their way
    idle = {"queue_s": {"a": 0.0}, "used_share": {"a": 0.1}}
    assert policy(policy_context(2, 2, **idle)) == (1, {})


def test_what_was_set_by_hand_last_counts_more_than_all_signals():
    policy = TargetPolicy(queue_s=1.0, used_share=0.7, fewest=2, most=3, upscale_delay_s=99.0, downscale_delay_s=99.0)
    full = {"queue_s": {"a": 9.0, "b": 9.0}, "used_share": {"a": 1.0, "b": 1.0}}
    assert policy(policy_context(2, 2, held={"a": 1.0}, **full)) == (1, {})
    assert policy(policy_context(2, 2, held={"a": 1.0, "b": 3.0}, **full)) == (3, {})  # b has recorded last
    assert policy(policy_context(2, 2, held={"a": 7.0}, **full)) == (3, {})  # there are three routers
    drafts = DraftPolicy(busy_share=0.7, late_share=0.1, min_gain=0.1, fewest=2, most=3)
    assert drafts(policy_context(2, 2, held={"a": 7.0}, **full)) == (7, {})
    assert policy(policy_context(0, 2, held={})) == (2, {})
    assert policy(policy_context(5, 5, held={"a": 0.0})) == (3, {})  # nobody holds it any more, and nothing is recorded


def test_signals_must_have_asked_for_it_for_so_long(monkeypatch):
    policy = TargetPolicy(queue_s=1.0, used_share=0.7, upscale_delay_s=10.0, downscale_delay_s=20.0)
    full = {"queue_s": {"a": 9.0}, "used_share": {"a": 1.0}}
    idle = {"queue_s": {"a": 0.0}, "used_share": {"a": 0.1}}
    state: dict[str, object] = {}

    def decided(now, told):
        nonlocal state
        monkeypatch.setattr("time.time", lambda: now)
        number, state = policy(policy_context(2, 2, state=state, **told))
        return number

    assert [decided(now, full) for now in (0.0, 9.0, 10.0)] == [2, 2, 3]
    assert [decided(now, idle) for now in (11.0, 30.0, 31.0)] == [2, 2, 1]
    assert [decided(0.0, full), decided(5.0, idle), decided(10.0, full), decided(19.0, full)] == [2, 2, 2, 2]


@pytest.mark.parametrize(("share", "numbers"), [(1.0, (2, 5)), (0.5, (1, 3)), (0.25, (1, 1)), (0.0, (0, 0))])
def test_in_an_incremental_upgrade_each_cluster_has_its_share(share, numbers):
    policy = TargetPolicy(queue_s=1.0, used_share=0.7, fewest=2, most=9)
    assert policy(policy_context(0, 0, share=share))[0] == numbers[0]
    assert policy(policy_context(1, 1, share=share, held={"a": 5.0}))[0] == numbers[1]


def test_serves_own_autoscaler_goes_up_and_down_by_what_groups_report(tmp_path):
    options = TargetGroupOptions(device="cpu", groups=1, max_groups=2)
    settings = TargetSettings(ModelSource("x", "x", tmp_path), options)
    scaling = AutoscalingConfig(look_back_s=2.0, upscale_delay_s=0.0, downscale_delay_s=0.0)
    decided = autoscaler_of(target_group_application(settings, "directory", batch_limit_s=1.0, scaling=scaling))

    assert decided(1) == 1  # nothing is known yet
    assert [decided(replicas, queue_s=5.0, used_share=1.0) for replicas in (1, 2)] == [2, 2]
    assert [decided(replicas, queue_s=0.0, used_share=0.1) for replicas in (2, 1)] == [1, 1]


def test_what_a_router_says_is_how_long_its_oldest_waits_and_how_full_its_group_is():
    core = RouterCore(toy_info(97, 256, 4), RouterConfig(max_running=2, max_waiting=8), SpeculationConfig(), {})
    target = ToyTarget(eos_token_id=3, seed=4)
    assert core.target_demand(0.0) == TargetDemand()
    for number in range(4):
        request = GenerationRequest(
            request_id=f"r{number}",
            prompt_token_ids=np.array([5, 6, 7], np.int32),
            sampling=SamplingParams(seed=1, temperature=0.0),
            max_new_tokens=40,
        )
        core.add(request, float(number))
    toy_round(core, target.verify, 4.0)
    assert core.target_demand(10.0) == TargetDemand(8.0, 1.0)  # the third one came at 2
    for number in range(4):
        core.cancel(f"r{number}")
    while core.has_work:
        toy_round(core, target.verify, 11.0)
    assert core.target_demand(12.0) == TargetDemand()


class Shell(TargetGroup):
    """A group without ranks."""

    def __init__(self, directory: SimpleNamespace) -> None:
        self._demand = DemandReader("nobody", lambda _: directory.target_demand.remote())
        self._demand._directory = directory

    def __del__(self) -> None:
        pass


def directory_that(says) -> SimpleNamespace:
    async def remote():
        if isinstance(says, Exception):
            raise says
        return says

    return SimpleNamespace(target_demand=SimpleNamespace(remote=remote))


async def test_a_group_records_nothing_while_the_directory_is_away_so_that_none_goes_for_that():
    told = await Shell(directory_that(TargetDemand(2.0, 0.75))).record_autoscaling_stats()
    assert told == {"queue_s": 2.0, "used_share": 0.75, "held": 0}
    assert await Shell(directory_that(ActorUnavailableError("away", None))).record_autoscaling_stats() == {}


async def test_demand_is_asked_for_less_often_where_the_directory_has_very_many_callers():
    answers = [TargetDemand(1.0, stretch=3), TargetDemand(2.0), TargetDemand(3.0)]

    async def ask(_: object) -> TargetDemand:
        return answers.pop(0)

    reader = DemandReader("nobody", ask)
    reader._directory = SimpleNamespace()
    assert [(await reader.read()).queue_s for _ in range(5)] == [1.0, 1.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(("groups", "max_groups"), [(0, 4), (5, 4), (1, 1025)])
def test_fewer_groups_than_one_or_more_than_the_most_are_refused(groups, max_groups):
    with pytest.raises(ValidationError, match="groups"):
        ClusterConfig.model_validate({"target": {"groups": groups, "max_groups": max_groups}})
