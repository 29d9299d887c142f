"""Tokens of tenants that wait, by weight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.router.fair_turns import FairTurns

TENANTS = "abc"


def serve(turns, waiting, weights, tokens):
    """Serve one request of the tenant whose turn it is."""
    turns.wait(waiting)
    tenant = min(waiting, key=lambda one: (turns.spent(one), one))
    turns.charge(tenant, weights.get(tenant, 1.0), tokens)
    return tenant


@given(
    weights=st.fixed_dictionaries({tenant: st.sampled_from([0.01, 0.5, 1.0, 3.0]) for tenant in TENANTS}),
    costs=st.lists(st.integers(1, 500), min_size=1, max_size=200),
)
def test_tenants_that_wait_all_the_time_get_tokens_by_weight_within_one_request(weights, costs):
    turns, got = FairTurns(), dict.fromkeys(TENANTS, 0.0)
    for tokens in costs:
        tenant = serve(turns, TENANTS, weights, tokens)
        got[tenant] += tokens / weights[tenant]
        spread = max(got.values()) - min(got.values())
        assert spread <= max(costs) / min(weights.values()) + 1e-6


def test_a_tenant_that_comes_late_has_saved_nothing_up():
    turns = FairTurns()
    for _ in range(50):
        serve(turns, "a", {}, 100)
    served = [serve(turns, "ab", {}, 100) for _ in range(20)]
    assert served.count("b") == pytest.approx(10, abs=1)


def test_what_was_charged_too_much_is_given_back():
    turns = FairTurns()
    turns.wait("ab")
    turns.charge("a", 1.0, 1000)
    turns.charge("a", 1.0, -990)
    assert [serve(turns, "ab", {}, 6) for _ in range(3)] == ["b", "b", "a"]


def test_tenants_that_are_not_ahead_of_those_who_wait_are_forgotten():
    turns = FairTurns()
    for number in range(1000):
        serve(turns, [f"tenant {number}", "always"], {}, 10)
    turns.wait(["always"])
    assert not turns._spent
    turns.charge("a", 1.0, 10)
    turns.clear()
    assert serve(turns, "ab", {}, 10) == "a"
