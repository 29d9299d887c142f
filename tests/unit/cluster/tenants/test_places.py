"""Leases of tenants' places in simulated time: how many sequences run at all gateways together."""

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import InvalidRequest
from cache_service.errors import StoreUnavailable
from cluster.simulate.tenant_leases import StoredPlaces
from cluster.tenants.errors import OverLimit
from cluster.tenants.lease import LIFE_S
from cluster.tenants.limiter import TenantLimiter
from cluster.tenants.places import PLACES_LIFE_S, LeasedPlaces
from cluster.tenants.registry import TenantLimits
from cluster.tenants.renewal import LeaseRenewal
from paceline_testing.clock import Clock
from paceline_testing.places import PlacesLoad, places_used


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 60), st.floats(0.3, 4), st.integers(1, 50), st.floats(0, 2.5), st.sampled_from([0.3, 3.0]),
    st.integers(1, 4), st.lists(st.floats(0, 25), max_size=4), st.integers(0, 2**32),
)  # fmt: skip
def test_no_more_sequences_run_than_the_limit_whoever_dies(limit, over, gateways, skew, answer_s, size, deaths, seed):
    def check(running, now):
        assert sum(running.values()) <= limit, (running, now)

    load = PlacesLoad(
        limit, over * limit, gateways, skew, answer_s, min(size, limit), seconds=30.0, seed=seed,
        dies={number % gateways: at for number, at in enumerate(deaths)},
    )  # fmt: skip
    places_used(load, check)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 20), st.floats(0.1, 0.9), st.sampled_from([0.3, 3.0]), st.integers(0, 2**32))
def test_reports_and_answers_that_are_lost_add_no_places(limit, gateways, lost, answer_s, seed):
    def check(running, now):
        assert sum(running.values()) <= limit, (running, now)

    load = PlacesLoad(limit, 3 * limit, gateways, answer_s=answer_s, seconds=30.0, seed=seed, lost=lost)
    places_used(load, check)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.floats(5, 30), st.floats(0.1, 30), st.integers(0, 2**32))
def test_an_outage_leaves_shares_and_the_limit_holds_again_after_it(limit, gateways, begin, lasts, seed):
    down = begin, begin + lasts
    load = PlacesLoad(limit, 3 * limit, gateways, answer_s=2.0, seconds=down[1] + 60, seed=seed, down=down)
    share = math.ceil(limit / gateways)

    def check(running, now):  # the leases of before, and shares
        assert sum(running.values()) <= limit + gateways * share, (running, now)

    used = places_used(load, check)
    assert used.most_late <= limit


@pytest.mark.parametrize("gateways", [2, 10, 50])
@pytest.mark.parametrize("skew", [0.0, 2.0])
def test_places_are_used_as_one_gateway_would_use_them(gateways, skew):
    load = {"limit": 20, "demand": 40.0, "gateways": gateways, "skew": skew}
    used = places_used(PlacesLoad(**load))
    assert used.mean >= 0.95 * used.mean_ideal
    assert used.calls <= 14 * 120 * gateways
    if skew:
        assert places_used(PlacesLoad(**load, leases=False)).mean < 0.9 * used.mean_ideal


def renew(places, store, gateway, running, now):
    places.renew(store.renew(gateway, places.report(running, now), now))


def ask(places, store, gateway, count, running, now):
    """Whether so many more sequences may run."""
    if places.should_ask(count, running, now):
        places.waiting += count
        renew(places, store, gateway, running, now)
        places.waiting -= count
    places.ask(count, now)
    return running + count <= places.most(now)


def test_one_gateway_of_ten_gets_all_places_and_then_another_one():
    store, (first, second) = StoredPlaces(), (LeasedPlaces(8, 10) for _ in range(2))
    assert all(ask(first, store, 0, 1, running, 0.01 * running) for running in range(8))
    assert not ask(first, store, 0, 1, 8, 0.2)
    assert not ask(second, store, 1, 1, 0, 0.2)
    renew(first, store, 0, 5, 0.3)
    assert ask(second, store, 1, 2, 0, 0.35)  # the first one keeps one of three for what comes next
    assert not ask(second, store, 1, 1, 2, 0.36)


def test_all_places_at_once_are_had_by_a_single_request():
    store, places = StoredPlaces(), LeasedPlaces(8, 10)
    assert ask(places, store, 0, 8, 0, 0.0)


def test_a_request_for_more_places_than_are_left_asks_only_now_and_then():
    store, (first, second) = StoredPlaces(), (LeasedPlaces(8, 10) for _ in range(2))
    assert ask(first, store, 0, 5, 0, 0.0)
    assert not ask(second, store, 1, 4, 0, 0.0)  # it gets three, which are too few
    assert not second.should_ask(4, 0, 0.05)
    assert second.should_ask(4, 0, 0.15)
    assert ask(second, store, 1, 3, 0, 0.15)


def test_places_of_a_gateway_that_dies_come_back():
    store, (first, second) = StoredPlaces(), (LeasedPlaces(8, 10) for _ in range(2))
    assert ask(first, store, 0, 8, 0, 0.0)
    assert not ask(second, store, 1, 1, 0, PLACES_LIFE_S - 0.1)
    assert ask(second, store, 1, 8, 0, PLACES_LIFE_S + 0.1)


def test_places_that_are_given_back_are_not_taken_until_the_answer_comes():
    store, places = StoredPlaces(), LeasedPlaces(8, 2)
    assert ask(places, store, 0, 8, 0, 0.0)
    report = places.report(2, 1.0)
    assert report.kept < 8
    assert places.most(1.0) == report.kept  # others may have the rest now
    told = store.renew(0, report, 1.0)
    assert told.held >= places.most(1.0)
    places.renew(told)


def test_a_lease_counts_from_its_report_and_ends_before_the_places_do():
    store, places = StoredPlaces(), LeasedPlaces(8, 4)
    assert ask(places, store, 0, 8, 0, 0.0)
    assert places.most(LIFE_S) == 8
    assert places.most(LIFE_S + 0.01) == 2
    assert LIFE_S < PLACES_LIFE_S


def test_whoever_has_no_sequences_gives_all_places_back_and_is_idle():
    store, places = StoredPlaces(), LeasedPlaces(8, 4)
    assert ask(places, store, 0, 8, 0, 0.0)
    now = 0.0
    while not places.is_idle(now):
        now += 0.25
        renew(places, store, 0, 0, now)
        assert now < 5
    assert places.has_lease(now)
    assert ask(LeasedPlaces(8, 4), store, 1, 8, 0, now)


def test_a_lower_limit_leaves_what_runs_and_admits_no_more():
    store, places = StoredPlaces(), LeasedPlaces(8, 4)
    assert ask(places, store, 0, 6, 0, 0.0)
    places.limit = 3
    renew(places, store, 0, 6, 0.2)
    assert not ask(places, store, 0, 1, 6, 0.4)
    assert not ask(LeasedPlaces(3, 4), store, 1, 1, 0, 0.4)
    renew(places, store, 0, 2, 0.6)
    assert ask(places, store, 0, 1, 2, 0.8)


class Leases:
    def renew(self, reports):
        return {}


class Places:
    """A store in this process, which may be away."""

    def __init__(self):
        self.stored, self.num_calls, self.is_away = StoredPlaces(), 0, False

    def renew(self, reports):
        self.num_calls += 1
        if self.is_away:
            raise StoreUnavailable("away")
        return {tenant: self.stored.renew(0, one, 0.0) for tenant, one in reports.items()}


@pytest.fixture
def patient(monkeypatch):
    """However busy the machine is, a lease comes in time."""
    monkeypatch.setattr("cluster.tenants.renewal.FIRST_WAIT_S", 10.0)


async def test_a_call_waits_for_its_places_and_others_ask_nobody(patient):
    store, limiter = Places(), TenantLimiter(TenantLimits(max_concurrent=8), 10, is_leased=True)
    renewal = LeaseRenewal(Leases(), store)
    running = asyncio.create_task(renewal.run())
    await asyncio.gather(*(renewal.places("a", limiter, 1) for _ in range(5)))
    assert store.num_calls == 1
    with limiter.admitted(1, 5):
        await renewal.places("a", limiter, 3)
        with limiter.admitted(1, 3):
            assert limiter.num_running == 8
    before = store.num_calls
    await renewal.places("a", limiter, 8)
    with limiter.admitted(1, 8), pytest.raises(OverLimit):
        limiter.admitted(1, 1).__enter__()
    assert store.num_calls - before <= 1  # a renewal may have come between
    with pytest.raises(InvalidRequest, match="n is 9; the tenant may have at most 8"):
        limiter.admitted(1, 9).__enter__()
    running.cancel()


async def test_without_a_store_that_answers_places_are_shared_and_nobody_waits():
    store, limiter = Places(), TenantLimiter(TenantLimits(max_concurrent=8), 4)
    store.is_away = True
    renewal = LeaseRenewal(Leases(), store)
    running = asyncio.create_task(renewal.run())
    for _ in range(10):
        await renewal.places("a", limiter, 2)
    with limiter.admitted(1, 2), pytest.raises(OverLimit):
        limiter.admitted(1, 1).__enter__()
    assert store.num_calls <= 3
    running.cancel()


async def test_a_tenant_without_sequences_is_dropped_when_its_places_are_given_back():
    clock = Clock()
    store, limiter = Places(), TenantLimiter(TenantLimits(max_concurrent=8), 4, clock=clock)
    renewal = LeaseRenewal(Leases(), store)
    renewal._active["a"] = limiter
    with limiter.waiting_for_places(2):
        await renewal._renew()
    with limiter.admitted(1, 2):
        clock.now += 1
        await renewal._renew()
        assert limiter.max_running > 2
    for _ in range(20):
        clock.now += 0.25
        await renewal._renew()
    assert not renewal._active
    assert not store.stored._held


def test_an_answer_that_comes_after_the_limit_was_taken_away_and_given_again_counts_for_nothing():
    clock, store = Clock(), StoredPlaces()
    limiter = TenantLimiter(TenantLimits(max_concurrent=8), 4, clock=clock)
    with limiter.waiting_for_places(8):
        told = store.renew(0, limiter.places_report(), 0.0)
    limiter.change(TenantLimits())
    limiter.change(TenantLimits(max_concurrent=8))
    limiter.renew_places(told)
    assert limiter.max_running == 2
    for _ in range(2):
        with limiter.admitted(1, 1):
            limiter.renew_places(store.renew(0, limiter.places_report(), 0.0))
    assert limiter.max_running >= 2


def test_a_limit_that_is_taken_away_and_given_again_counts_what_runs():
    limiter = TenantLimiter(TenantLimits(max_concurrent=2))
    with limiter.admitted(1, 2):
        limiter.change(TenantLimits())
        assert limiter.max_running is None
        limiter.change(TenantLimits(max_concurrent=3))
        with pytest.raises(OverLimit):
            limiter.admitted(1, 2).__enter__()
