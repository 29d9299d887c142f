"""How many draft workers there should be: the decision, and the router's estimate that it goes by."""

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.models.source import ModelSource
from actors.options import DraftPoolOptions
from actors.workers.autoscaling import AutoscalingConfig, DraftPolicy, DraftSignals, desired_workers
from actors.workers.demand import DraftDemand, combined_drafts
from actors.workers.draft_pool import draft_pool_application
from actors.workers.settings import DraftSettings
from cluster.config import ClusterConfig
from cluster.router.draft_scaling import DraftScaling
from paceline_testing.serve_autoscaler import autoscaler_of, policy_context

SHARES = st.floats(0.0, 1.0)
SIGNALS = st.builds(DraftSignals, SHARES, SHARES, st.floats(0.0, 2.0), SHARES)
TARGETS = st.builds(DraftPolicy, busy_share=st.floats(0.05, 1.0), late_share=SHARES, min_gain=st.floats(0.001, 0.5))
WORKERS = st.integers(1, 64)
USUAL = DraftPolicy(busy_share=0.6, late_share=0.05, min_gain=0.03)


@given(SIGNALS, TARGETS, st.integers(0, 100), st.integers(0, 20), st.integers(0, 40))
def test_the_decision_stays_within_its_bounds_and_at_most_doubles(signals, targets, workers, fewest, more):
    desired = desired_workers(signals, targets, workers, fewest, fewest + more)
    assert fewest <= desired <= fewest + more
    assert desired <= max(fewest, 2 * max(1, workers))


@given(SIGNALS, SIGNALS, TARGETS, WORKERS)
def test_larger_signals_never_want_fewer_workers(one, other, targets, workers):
    def each(pick):
        return DraftSignals(*map(pick, astuple(one), astuple(other)))

    assert desired_workers(each(min), targets, workers, 1, 99) <= desired_workers(each(max), targets, workers, 1, 99)


@given(SIGNALS, TARGETS, WORKERS)
def test_a_worker_that_came_for_a_reason_is_not_sent_away_by_its_own_effect(signals, targets, workers):
    came = desired_workers(signals, targets, workers, 1, 999)
    if came != workers + 1:
        return
    # The work is spread over one more, nothing is late any longer, and the planner would miss now what it gained.
    after = DraftSignals(signals.busy_share * workers / came, 0.0, 0.0, signals.gain / (1.0 + signals.gain))
    assert desired_workers(after, targets, came, 1, 999) >= came


@given(SIGNALS, TARGETS, st.integers(2, 64))
def test_one_that_went_is_not_called_back_by_its_own_effect(signals, targets, workers):
    left = desired_workers(signals, targets, workers, 1, 999)
    if left >= workers:
        return
    after = DraftSignals(
        signals.busy_share * workers / left, signals.late_share, signals.loss / (1.0 - signals.loss), signals.loss
    )
    assert desired_workers(after, targets, left, 1, 999) <= left


def test_the_planner_has_the_last_word():
    busy = DraftSignals(busy_share=0.9, late_share=0.0, gain=0.1, loss=0.1)
    assert desired_workers(busy, USUAL, 2, 1, 8) == 3
    assert desired_workers(replace(busy, gain=0.01), USUAL, 2, 1, 8) == 2  # no more tokens would come of it
    late = DraftSignals(busy_share=0.1, late_share=0.5, gain=0.1, loss=0.1)
    assert desired_workers(late, USUAL, 2, 1, 8) == 3
    idle = DraftSignals(0.0, 0.0, 0.0, 0.0)
    assert [desired_workers(idle, USUAL, workers, 1, 8) for workers in (3, 2, 1)] == [2, 1, 1]
    assert desired_workers(replace(idle, loss=0.05), USUAL, 3, 1, 8) == 3  # seldom busy, but worth having


def test_serves_policy_adds_up_what_replicas_have_recorded():
    policy = DraftPolicy(busy_share=0.6, late_share=0.05, min_gain=0.03)
    assert policy(policy_context(2, 2)) == (2, {})
    told = {"late_share": {"a": 0.0}, "gain": {"a": 0.2}, "loss": {"a": 0.1}}
    assert policy(policy_context(2, 2, busy_share={"a": 0.9, "b": 0.9}, **told)) == (3, {})
    assert policy(policy_context(2, 2, busy_share={"a": 0.9}, **told)) == (2, {})  # one that says nothing is idle
    assert policy(policy_context(1, 3, busy_share={"a": 0.9}, **told)) == (3, {})  # two are on their way
    assert policy(policy_context(1, 3, busy_share={"a": 0.1}, **told)) == (1, {})


def test_serves_own_autoscaler_goes_up_and_down_by_what_replicas_report(tmp_path):
    source = ModelSource(spec="x", name="x", path=tmp_path)
    settings = DraftSettings(source, DraftPoolOptions(device="cpu", workers=1, max_workers=3))
    scaling = AutoscalingConfig(look_back_s=2.0, upscale_delay_s=0.0, downscale_delay_s=0.0)
    decided = autoscaler_of(draft_pool_application(settings, "directory", scaling))

    assert decided(1) == 1  # nothing is known yet
    busy = {"busy_share": 0.95, "late_share": 0.0, "gain": 0.2, "loss": 0.2}
    assert [decided(replicas, **busy) for replicas in (1, 2, 3)] == [2, 3, 3]
    idle = dict.fromkeys(busy, 0.0)
    assert [decided(replicas, **idle) for replicas in (3, 2, 1)] == [2, 1, 1]
    # More than by themselves, and at once; Serve itself bounds and delays nothing.
    assert [decided(replicas, **idle, held=7) for replicas in (1, 7)] == [7, 7]
    assert [decided(replicas, **busy, held=1) for replicas in (3, 1)] == [1, 1]
    assert decided(3, **idle, held=0) == 2


def test_a_fixed_number_of_workers_stays_unless_another_one_is_set_by_hand(tmp_path):
    source = ModelSource(spec="x", name="x", path=tmp_path)
    settings = DraftSettings(source, DraftPoolOptions(device="cpu", workers=1))
    decided = autoscaler_of(draft_pool_application(settings, "directory", AutoscalingConfig()))
    busy = {"busy_share": 0.95, "late_share": 1.0, "gain": 0.5, "loss": 0.5}
    assert [decided(1), decided(1, **busy)] == [1, 1]
    assert decided(1, **busy, held=3) == 3


def observed(sequences=8, workers=1, per_sequence_s=0.004, fixed_s=0.002, gained=16, late=0) -> DraftDemand:
    """The demand of a router whose rounds take 20 ms besides the wait, with drafts as good as `gained` of 24 tokens."""
    scaling = DraftScaling()
    for number in range(200):
        each = (sequences - number % 3) / workers
        elapsed_s = fixed_s + per_sequence_s * each
        scaling.observe_answer(max(1, round(each)), fixed_s + per_sequence_s * max(1, round(each)))
        for _ in range(late):
            scaling.observe_late()
        scaling.observe_round(sequences, workers, 8 + gained, gained, (elapsed_s, 0.0, 0.02), float(number))
    return scaling.demand(200.0)


def test_a_worker_more_gains_what_the_round_waits_less():
    demand = observed()
    present, further = 24 / (0.02 + 0.030), 24 / (0.02 + 0.030 - 0.004 * 4)
    assert demand.gain == pytest.approx(further / present - 1.0, rel=0.1)
    assert demand.loss == pytest.approx(1.0 - (8 / 0.02) / present, rel=0.1)  # without the only one there are no drafts
    assert demand.late_share == 0.0


def test_the_more_workers_there_are_the_less_is_one_more_worth():
    gains = [observed(workers=workers).gain for workers in (1, 2, 4, 8)]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] == 0.0  # each has one sequence


def test_what_a_draft_costs_whatever_the_number_of_sequences_is_not_shared_out():
    assert observed(per_sequence_s=0.0, fixed_s=0.034).gain < 0.05
    assert observed(per_sequence_s=0.004, fixed_s=0.002).gain > 0.3


def test_drafts_that_are_never_right_are_worth_no_further_worker():
    demand = observed(gained=0)
    assert demand.gain == demand.loss == 0.0


def test_drafts_that_come_too_late_would_come_in_time():
    assert observed(late=1).late_share == pytest.approx(0.5, abs=0.02)
    assert observed(late=1).gain > observed().gain


def test_a_router_that_has_not_asked_for_long_wants_nothing():
    scaling = DraftScaling()
    assert scaling.demand(0.0) == DraftDemand()
    scaling.observe_answer(4, 0.02)
    scaling.observe_round(4, 1, 12, 8, (0.02, 0.0, 0.02), 100.0)
    assert scaling.demand(101.0).gain > 0.0
    assert scaling.demand(200.0) == DraftDemand()


def test_the_router_that_wants_most_decides():
    assert combined_drafts([]) == DraftDemand()
    assert combined_drafts([DraftDemand(0.1, 0.0, 0.3), DraftDemand(0.0, 0.2, 0.1)]) == DraftDemand(0.1, 0.2, 0.3)


@pytest.mark.parametrize("workers", [0, 5])
def test_fewer_workers_than_one_or_more_than_the_most_are_refused(workers):
    with pytest.raises(ValidationError, match=f"workers is {workers}"):
        ClusterConfig.model_validate({"draft": {"workers": workers, "max_workers": 4}})
