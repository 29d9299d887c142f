"""What faults do to requests in simulated time."""

import pytest

from cluster.simulate.faults import Fault
from cluster.simulate.gateway import GATEWAY_LOST, is_right
from paceline_testing.simulated import simulated

BUSY = {"conversations_per_s": 2.0, "turns": 1.0, "answer_tokens": 60, "spread": 0.0}
LONG = {**BUSY, "answer_tokens": 200}


def run(faults, config=None, traffic=BUSY, seconds=10.0, rest_s=10.0, **options):
    """All requests with their gateway, once they have ended."""
    calls = []
    simulation = simulated(config, seconds, traffic, faults, calls.append, **options)
    simulation.run()
    simulation.traffic.stop()
    simulation.events.run(seconds + rest_s)
    assert not simulation.calls
    assert all(map(is_right, calls))
    gateways = simulation.cluster.gateways
    return simulation, [(call.record, gateways.index(call.gateway)) for call in calls]


@pytest.mark.parametrize(
    "kind",
    ["target", "router", "zone", "store", "draft_worker", "gateway_link", "target_link", "draft_link", "store_link"],
)
def test_faults_cost_time_and_no_token(kind):
    config = {"target": {"groups": 2}, "draft": {"workers": 1}}
    faults = [Fault(2.0, kind, 0, 3.0), Fault(6.0, kind, 1, 1.0)]
    _, calls = run(faults, config, {"conversations_per_s": 1.0})
    assert len(calls) > 5
    assert {record.outcome for record, _ in calls} == {"answered"}
    assert (sum(record.resumed for record, _ in calls) > 0) >= (kind == "router")


def test_a_part_that_is_lost_again_meanwhile_comes_back_when_both_outages_are_over():
    traffic = {**BUSY, "answer_tokens": 10}
    _, calls = run([Fault(2.0, "router", 0, 3.0), Fault(4.0, "router", 0, 4.0)], {"target": {"groups": 1}}, traffic)
    assert {record.outcome for record, _ in calls} == {"answered"}
    during = [record for record, _ in calls if 2.5 < record.arrived < 7.5]
    assert len(during) > 3
    assert all(record.first_at > 8.0 for record in during)


def test_a_gateway_that_dies_ends_its_own_requests_and_no_others():
    _, calls = run([Fault(4.0, "gateway", 0, 3.0)], {"target": {"groups": 2}, "gateway": {"replicas": 2}}, LONG)
    lost = [record for record, gateway in calls if record.outcome == GATEWAY_LOST]
    assert lost
    assert all(gateway == 0 for record, gateway in calls if record.outcome == GATEWAY_LOST)
    assert all(record.arrived < 4.0 <= record.ended_at or record.num_tokens for record in lost)
    rest = [(record, gateway) for record, gateway in calls if record.outcome != GATEWAY_LOST]
    assert {record.outcome for record, _ in rest} == {"answered"}
    assert all(gateway == 1 for record, gateway in rest if 4.0 < record.arrived < 7.0)
    assert {gateway for record, gateway in rest if record.arrived > 7.0} == {0, 1}


def test_routers_free_what_a_dead_gateway_had_asked_for():
    simulation = simulated(
        {"gateway": {"replicas": 1}}, 4.1, {**LONG, "answer_tokens": 2000}, [Fault(4.0, "gateway", 0, 9.0)]
    )
    simulation.run()
    (group,) = simulation.cluster.groups.values()
    assert len(simulation.records) > 3
    assert not group.num_open


def test_without_any_gateway_requests_end_at_once():
    _, calls = run([Fault(0.0, "gateway", 0, 99.0)], {"gateway": {"replicas": 1}})
    assert {record.outcome for record, _ in calls} == {GATEWAY_LOST}


def test_a_gateway_cut_off_from_the_only_router_waits_while_another_goes_on():
    config = {"gateway": {"replicas": 2, "request_timeout_s": 60.0}}
    _, calls = run([Fault(2.0, "gateway_link", 0, 5.0)], config)
    during = [(record, gateway) for record, gateway in calls if 2.0 < record.arrived < 6.0]
    cut, other = ([record for record, gateway in during if gateway == number] for number in (0, 1))
    assert cut
    assert other
    assert all(record.first_at > 7.0 for record in cut)
    assert all(record.ttft_s < 1.0 for record in other)
    assert sum(record.resumed for record in cut) >= len(cut)


def test_a_short_cut_only_delays_messages():
    config = {"gateway": {"replicas": 2}}
    _, calls = run([Fault(2.0, "gateway_link", 0, 1.0), Fault(5.0, "target_link", 0, 1.0)], config)
    assert not sum(record.resumed for record, _ in calls)
    assert any(record.ttft_s > 0.5 for record, _ in calls)


def test_a_router_cut_off_from_its_target_sends_no_answers_and_goes_on_afterwards():
    _, calls = run([Fault(2.0, "target_link", 0, 5.0)], {"gateway": {"request_timeout_s": 60.0}})
    during = [record for record, _ in calls if 2.0 < record.arrived < 6.0]
    assert during
    assert all(record.first_at > 7.0 for record in during)


def test_a_router_cut_off_from_draft_workers_decodes_without_them():
    def tokens_per_round(faults):
        config = {"draft": {"model": "auto", "workers": 1}, "speculation": {"drafters": ["draft_model"]}}
        _, calls = run(faults, config, draft={"right": 0.9})
        during = [record for record, _ in calls if 2.0 < record.arrived < 5.0]
        return sum(record.num_tokens for record in during) / sum(record.rounds for record in during)

    assert tokens_per_round([Fault(0.0, "draft_link", 0, 20.0)]) < 1.2 < 2.0 < tokens_per_round([])


def test_a_router_cut_off_from_the_store_reads_later_what_others_wrote():
    config = {"target": {"groups": 2}}
    simulation = simulated(config, 6.0, {**BUSY, "tenants": 1}, [Fault(2.0, "store_link", 0, 8.0)])
    known = {}

    def note(moment):
        known[moment] = [
            sum(len(tail) for tail in group._cache._tails.values()) for group in simulation.cluster.groups.values()
        ]

    for moment in (2.5, 6.0):
        simulation.events.at(moment, note, moment)
    simulation.run()
    assert known[6.0][0] == known[2.5][0]
    assert known[6.0][1] > known[2.5][1] > 0
    simulation.traffic.stop()
    simulation.events.run(20.0)
    note(20.0)
    assert known[20.0][0] == known[20.0][1] > known[6.0][1]
