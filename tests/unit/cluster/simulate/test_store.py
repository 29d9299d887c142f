"""The simulated store: how much it lets through, and limits of tenants that gateways lease there."""

import pytest

from cluster.simulate.faults import Fault
from paceline_testing.simulated import simulated

FOLLOWED = {"conversations_per_s": 6.0, "turns": 1.0, "answer_tokens": 40, "tenants": 1}


def test_followers_reads_saturate_the_store():
    def figures(groups, bytes_per_s=None):
        costs = {"store_bytes_per_s": bytes_per_s}
        return simulated({"target": {"groups": groups}}, 5.0, FOLLOWED, costs=costs).run().figures

    free = figures(5)
    traffic = free["store_read_bytes_per_s"] + free["store_written_bytes_per_s"]
    assert free["store_read_bytes_per_s"] > 2.5 * free["store_written_bytes_per_s"]
    assert free["store_busy_share"] == 0.0
    wide, narrow, alone = figures(5, 4 * traffic), figures(5, traffic / 2), figures(1, traffic / 2)
    assert wide["store_busy_share"] < 0.5
    assert wide["store_read_delay_ms"] < 1.5 * free["store_read_delay_ms"]
    # Five followers want twice what it has, so they read ever later. With one, the same store is enough.
    assert narrow["store_busy_share"] > 1.0
    assert narrow["store_read_delay_ms"] > 10 * free["store_read_delay_ms"]
    assert alone["store_read_delay_ms"] < 4 * free["store_read_delay_ms"]
    assert narrow["requests_answered"] > 0.9 * free["requests_answered"]


def test_a_routers_own_link_to_the_store_is_a_limit():
    def delay_ms(**costs):
        return simulated({"target": {"groups": 2}}, 8.0, FOLLOWED, costs=costs).run().figures["store_read_delay_ms"]

    assert delay_ms(store_link_bytes_per_s=200.0) > 5 * delay_ms()


def test_a_slow_link_to_workers_slows_rounds():
    def tpot_ms(**costs):
        config = {"draft": {"model": "auto", "workers": 1}}
        return simulated(config, 8.0, costs=costs).run().figures["tpot_p50_ms"]

    assert tpot_ms(link_bytes_per_s=1e9) == pytest.approx(tpot_ms(), rel=0.02)
    assert tpot_ms(link_bytes_per_s=20e3) > 1.3 * tpot_ms()


@pytest.mark.parametrize(
    "limits", [{"requests_per_second": 2.0}, pytest.param({"tokens_per_minute": 4000}, marks=pytest.mark.slow)]
)
def test_limits_hold_where_one_gateway_of_two_has_all_requests(limits):
    """Without a store each gateway has its share: the one that is left may use half of the limit."""

    def admitted_per_s(url, faults):
        traffic = {**FOLLOWED, "answer_tokens": 10, "spread": 0.0, "retries": 0}
        config = {"gateway": {"replicas": 2}, "cache": {"url": url}, "router": {"max_running": 64}}
        simulation = simulated(config, 60.0, traffic, faults, tenant_limits=limits)
        simulation.run()
        late = [one for one in simulation.records if one.arrived > 25.0 and one.outcome in ("answered", "")]
        if "requests_per_second" in limits:
            return len(late) / 35.0
        return sum(one.num_prompt + one.num_tokens for one in late) / 35.0

    limit = limits.get("requests_per_second") or limits["tokens_per_minute"] / 60.0
    one_is_gone = [Fault(0.0, "gateway", 0, 200.0)]
    assert admitted_per_s(None, []) == pytest.approx(limit, rel=0.1)
    assert admitted_per_s(None, one_is_gone) == pytest.approx(limit, rel=0.1)
    assert admitted_per_s("none", one_is_gone) == pytest.approx(limit / 2, rel=0.2)
    cut = [*one_is_gone, Fault(10.0, "store_link", 1, 200.0)]
    assert admitted_per_s(None, cut) == pytest.approx(limit / 2, rel=0.2)


def test_places_are_not_more_than_the_limit_and_go_to_whoever_has_the_requests():
    def running(url, faults):
        """Sequences of one tenant at once: the most, and the mean after a while."""
        traffic = {**FOLLOWED, "answer_tokens": 100, "spread": 0.0, "retries": 0}
        config = {"gateway": {"replicas": 2}, "cache": {"url": url}, "router": {"max_running": 64}}
        simulation = simulated(config, 30.0, traffic, faults, tenant_limits={"max_concurrent": 6})
        (group,) = simulation.cluster.groups.values()
        counts = []
        simulation.events.every(0.05, lambda: counts.append(group.num_open))
        simulation.run()
        late = counts[len(counts) // 2 :]
        return max(counts), sum(late) / len(late)

    most, mean = running(None, [])
    assert most <= 6
    assert mean > 4.0
    one_is_gone = [Fault(5.0, "gateway", 0, 60.0)]
    most, mean = running(None, one_is_gone)
    assert most <= 6
    assert mean > 4.0
    _, mean = running("none", one_is_gone)
    assert mean <= 3.0
