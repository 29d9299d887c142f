"""Leases of tenants' limits in simulated time: what all gateways admit together, beside one gateway with the limit."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_service.errors import StoreUnavailable
from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.simulate.tenant_leases import StoredBucket
from cluster.tenants.access import TenantAccess
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.errors import OverLimit
from cluster.tenants.gatekeeper import Gatekeeper
from cluster.tenants.lease import LIFE_S, LeasedBucket
from cluster.tenants.limiter import TenantLimiter
from cluster.tenants.registry import TenantLimits
from cluster.tenants.renewal import LeaseRenewal
from paceline_testing.clock import Clock
from paceline_testing.leases import Load, admitted

TOKENS = {"rate": 200_000 / 60, "burst": 200_000.0}
REQUESTS = {"rate": 20.0, "burst": 20.0}


def check(load, minutes):
    """Within 5 % of what one gateway would admit, and of the limit where more is asked for, in each of the minutes."""
    ours, ideal, asked = admitted(load)
    limit = load.rate * 60.0
    for minute in minutes:
        assert abs(ours[minute] - ideal[minute]) <= 0.05 * limit, (minute, ours, ideal)
        if asked[minute] > 1.3 * limit:
            assert 0.95 * limit <= ours[minute] <= 1.05 * limit, (minute, ours, asked)


@settings(max_examples=6)
@given(
    st.integers(1, 50), st.floats(0, 2.5), st.sampled_from([0.5, 0.9, 1.4, 3.0]), st.booleans(), st.integers(0, 2**32)
)
def test_all_gateways_together_admit_what_the_limit_allows(gateways, skew, over, is_tokens, seed):
    limit, size = (TOKENS, 600.0) if is_tokens else (REQUESTS, 1.0)
    demand = over * limit["rate"]
    # A minute of tokens may be spent at once; it is gone at 1.4 times the limit after two minutes and a half.
    minutes = 4 if is_tokens and over == 1.4 else 3
    load = Load(**limit, demand=demand, size=size, gateways=gateways, skew=skew, minutes=minutes, seed=seed)
    check(load, [minutes - 1])


@settings(max_examples=3)
@given(st.integers(2, 50), st.lists(st.floats(0, 110), min_size=1, max_size=6), st.integers(0, 2**32))
def test_gateways_that_die_take_nothing_with_them(gateways, times, seed):
    dies = {number % gateways: at for number, at in enumerate(times)}
    load = Load(**REQUESTS, demand=40.0, size=1.0, gateways=gateways, skew=1.0, minutes=2, seed=seed, dies=dies)
    check(load, [1])


@settings(max_examples=3)
@given(st.integers(2, 50), st.floats(10, 50), st.floats(1, 65), st.integers(0, 2**32))
def test_an_outage_leaves_shares_and_nothing_is_owed_or_given_twice_after_it(gateways, begin, lasts, seed):
    down = begin, begin + lasts
    load = Load(**REQUESTS, demand=60.0, size=1.0, gateways=gateways, minutes=3, seed=seed, down=down)
    check(load, [2])
    ours, ideal, _ = admitted(load)
    assert sum(ours) <= sum(ideal) + gateways + 0.05 * 20 * 60  # a share has room for a request at least


def test_a_skewed_load_meets_its_limit_with_leases_and_not_with_shares():
    load = {**REQUESTS, "demand": 30.0, "size": 1.0, "gateways": 16, "skew": 2.0, "minutes": 2}
    check(Load(**load), [1])
    shares, _, _ = admitted(Load(**load, leases=False))
    assert shares[1] < 0.4 * 20 * 60


def test_a_lease_that_is_not_renewed_becomes_the_share_of_the_last_level():
    clock, store = Clock(), StoredBucket()
    bucket = LeasedBucket(10.0, 600.0, 4, clock.now)
    bucket.ask(1)
    bucket.renew(store.renew(bucket.report(clock.now), clock.now), clock.now)
    bucket.take(300, clock.now)
    assert bucket.wait_s(250, clock.now) == 0
    clock.now += LIFE_S + 1
    assert not bucket.has_lease(clock.now)
    # A quarter of 600 less what this gateway has spent, and what a quarter of the rate has brought since.
    left = 600 / 4 - 300 + 2.5 * (LIFE_S + 1)
    assert bucket.wait_s(10, clock.now) == pytest.approx((10 - left) / 2.5)
    assert bucket.report(clock.now).spent == pytest.approx(150 - left)
    clock.now += 1000  # the share is full again, and so is the cluster's bucket
    assert bucket.report(clock.now).spent == 0
    assert not bucket.is_idle  # it has not been said yet
    bucket.renew(store.renew(bucket.report(clock.now), clock.now), clock.now)
    assert bucket.is_idle
    assert bucket.has_lease(clock.now)


def test_what_is_taken_when_a_lease_ends_is_taken_once():
    bucket = LeasedBucket(10.0, 600.0, 4, 0.0)
    bucket.renew(StoredBucket().renew(bucket.report(0.0), 0.0), 0.0)
    bucket.take(300, LIFE_S + 1)  # nobody has asked for the lease since it ended
    assert bucket.report(LIFE_S + 1).spent == 300


def test_a_level_of_long_ago_refuses_nobody():
    clock, store = Clock(), StoredBucket()
    limiter = TenantLimiter(TenantLimits(tokens_per_minute=60), 2, clock=clock)

    def renew():
        told = {name: store.renew(report, clock.now) for name, report in limiter.reports(True).items()}
        limiter.renew(told)

    renew()
    limiter.spend(600)  # ten minutes' tokens
    renew()
    with pytest.raises(OverLimit):
        limiter.check_tokens(1)
    renew()
    clock.now += 3600
    assert limiter.awaits_lease
    limiter.check_tokens(30)  # its share, should no lease come


@pytest.mark.parametrize(("gateways", "demand"), [(10, 0.1), (50, 0.5), (2, 1.0), (10, 1.0), (10, 3.0)])
def test_a_low_limit_is_met_although_hardly_any_call_finds_a_lease(gateways, demand):
    rate = 0.2 if demand == 0.1 else 1.0
    load = Load(rate=rate, burst=1.0, demand=demand, size=1.0, gateways=gateways, minutes=12)
    ours, ideal, _ = admitted(load)
    assert sum(ours[1:]) == pytest.approx(sum(ideal[1:]), rel=0.05)


@pytest.mark.parametrize(("gateways", "demand"), [(10, 0.9), (50, 0.9), (50, 1.0), (50, 3.0)])
def test_a_minute_of_a_request_a_second_is_met_within_three_requests(gateways, demand):
    load = Load(rate=1.0, burst=1.0, demand=demand, size=1.0, gateways=gateways, minutes=8)
    check(load, range(2, 8))


def test_what_is_reported_while_the_answer_is_under_way_is_neither_lost_nor_counted_twice():
    clock, store = Clock(), StoredBucket()
    bucket = LeasedBucket(1.0, 60.0, 2, clock.now)
    bucket.take(10, clock.now)
    lost = bucket.report(clock.now)  # no answer comes
    bucket.take(5, clock.now)
    sent = bucket.report(clock.now)
    bucket.take(3, clock.now)
    bucket.renew(store.renew(sent, clock.now), clock.now)
    assert (lost.spent, sent.spent, bucket.report(clock.now).spent) == (10, 15, 3)


def test_no_bucket_in_the_store_begins_with_what_gateways_know():
    clock = Clock()
    bucket = LeasedBucket(1.0, 60.0, 2, clock.now)
    bucket.renew(StoredBucket().renew(bucket.report(clock.now), clock.now), clock.now)
    bucket.take(50, clock.now)
    clock.now += 1
    assert StoredBucket().renew(bucket.report(clock.now), clock.now).level == 10  # it was full, and 50 are spent


class Leases:
    """A store in this process, which may be away."""

    def __init__(self):
        self.buckets, self.calls, self.is_away = {}, [], False

    def renew(self, reports):
        self.calls.append({tenant: sorted(own) for tenant, own in reports.items()})
        if self.is_away:
            raise StoreUnavailable("away")
        return {
            tenant: {name: self.buckets.setdefault((tenant, name), StoredBucket()).renew(one, 0.0)
            for name, one in own.items()}
            for tenant, own in reports.items()
        }  # fmt: skip


class Places:
    """No tenant here has a limit of them."""

    def renew(self, reports):
        raise AssertionError(reports)


@pytest.fixture
def patient(monkeypatch):
    """However busy the machine is, a lease comes in time."""
    monkeypatch.setattr("cluster.tenants.renewal.FIRST_WAIT_S", 10.0)


async def test_a_first_prompt_waits_for_its_lease_and_the_second_asks_nobody(patient):
    leases, limiter = Leases(), TenantLimiter(TenantLimits(tokens_per_minute=1000, requests_per_second=9), 10)
    renewal = LeaseRenewal(leases, Places())
    running = asyncio.create_task(renewal.run())
    renewal.use("a", limiter)
    limiter.check_tokens(0)
    await renewal.first_lease(limiter)
    assert leases.calls == [{"a": ["requests_per_second", "tokens_per_minute"]}]
    with limiter.admitted(400, 1):  # a share of a tenth has 100
        pass
    await renewal.first_lease(limiter)
    assert len(leases.calls) == 1
    running.cancel()


async def test_a_call_has_its_lease_before_anything_is_charged(tmp_path, patient):
    key = TenantAdministration(tmp_path / "t.json").add("a", {"requests_per_second": 20, "tokens_per_minute": 1000}).key
    renewal, metrics = LeaseRenewal(Leases(), Places()), GatewayMetrics()
    access = TenantAccess(tmp_path / "t.json", may_be_open=False)
    keeper = Gatekeeper(access, 10, metrics.tenant_refusals, metrics.tenant_registry_failures, renewal=renewal)
    running = asyncio.create_task(renewal.run())
    for _ in range(3):  # a share has room for two
        tenant = await keeper.enter([f"Bearer {key}"])
    tenant.limiter.check_tokens(400)  # and for 100
    running.cancel()


async def test_without_a_store_that_answers_limits_are_shared_and_nobody_waits():
    leases, limiter = Leases(), TenantLimiter(TenantLimits(tokens_per_minute=1000), 10)
    leases.is_away = True
    renewal = LeaseRenewal(leases, Places())
    running = asyncio.create_task(renewal.run())
    renewal.use("a", limiter)
    await renewal.first_lease(limiter)
    with limiter.admitted(100, 1):
        pass
    with pytest.raises(OverLimit):
        limiter.check_tokens(20)
    tried = len(leases.calls)
    for _ in range(10):
        renewal.use("a", limiter)
        await renewal.first_lease(limiter)
    assert tried <= len(leases.calls) <= tried + 1
    running.cancel()


async def test_a_store_that_is_away_is_so_until_it_has_answered(caplog):
    """Also while there is nothing to ask it."""
    leases = Leases()
    leases.is_away = True
    renewal = LeaseRenewal(leases, Places())
    limiter = TenantLimiter(TenantLimits(tokens_per_minute=1000), 10, clock=Clock())
    for _ in range(3):
        renewal.use("a", limiter)
        await renewal._renew()
        await renewal._renew()
        await renewal._renew()
        assert renewal._breaker.is_open
    assert len(caplog.messages) == 1
    leases.is_away = False
    renewal.use("a", limiter)
    limiter.spend(1)
    await renewal._renew()
    assert not renewal._breaker.is_open


async def test_a_tenant_that_comes_has_its_lease_without_a_report_of_all_others():
    leases = Leases()
    renewal = LeaseRenewal(leases, Places())
    limiters = {name: TenantLimiter(TenantLimits(tokens_per_minute=1000), 2) for name in "abc"}
    for name in "ab":
        renewal.use(name, limiters[name])
    await renewal._renew()
    renewal.use("a", limiters["a"])
    limiters["a"].spend(1)
    renewal.use("c", limiters["c"])
    await renewal._renew(is_due=False)
    assert [sorted(call) for call in leases.calls] == [["a", "b"], ["c"]]
    await renewal._renew()
    assert sorted(leases.calls[-1]) == ["a"]


async def test_tenants_without_traffic_are_not_renewed():
    leases, limiter = Leases(), TenantLimiter(TenantLimits(tokens_per_minute=1000), 2, clock=Clock())
    renewal = LeaseRenewal(leases, Places())
    renewal.use("a", limiter)
    await renewal._renew()
    await renewal._renew()
    assert len(leases.calls) == 1
    renewal.use("a", limiter)
    with limiter.admitted(5, 1):
        await renewal._renew()
        await renewal._renew()
        assert len(leases.calls) == 2
        limiter.spend(5)  # an answer is under way, so it is still followed
        await renewal._renew()
    assert len(leases.calls) == 3
    await renewal._renew()
    assert not renewal._active
