"""Tenants: the registry and its file, keys, limits against a plain oracle, and who is let in."""

import contextlib
import hashlib
import hmac
import json
import os
import stat
from collections import Counter
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import InvalidRequest
from cluster.config import ClusterConfig
from cluster.errors import ConfigError
from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.tenants.access import TenantAccess, tenant_access
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.errors import OverLimit, TenantDisabled, Unauthenticated
from cluster.tenants.gatekeeper import Gatekeeper
from cluster.tenants.limiter import TenantLimiter
from cluster.tenants.registry import TenantLimits, now_utc
from cluster.tenants.registry_file import RegistryFollower, read_registry
from cluster.tenants.token_bucket import TokenBucket
from paceline_testing.clock import Clock


@pytest.fixture
def path(tmp_path):
    return tmp_path / "home" / "tenants.json"


@pytest.fixture
def admin(path):
    return TenantAdministration(path)


def gatekeeper(path, **options):
    access = TenantAccess(path, options.pop("may_be_open", False), options.pop("shared", False))
    metrics = options.pop("metrics", GatewayMetrics())
    counters = metrics.tenant_refusals, metrics.tenant_registry_failures
    return Gatekeeper(access, options.pop("num_processes", 1), *counters, **options)


def look_again(keeper):
    """As if a second had passed."""
    keeper._follower._checked_at -= 2


def refusals(metrics):
    return {
        sample.labels["reason"]: sample.value
        for family in metrics.tenant_refusals.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def test_a_key_is_nowhere_but_where_it_is_shown(admin, path):
    issued = [admin.add("a", {}), admin.rotate("a", timedelta(hours=1)), admin.add("b", {"policy": "promoted"})]
    written = b"".join(file.read_bytes() for file in path.parent.iterdir())
    for one in issued:
        assert one.key.startswith(f"pl-{one.tenant.id}-")
        assert one.key.encode() not in written
        assert one.key.rpartition("-")[2].encode() not in written
        assert hashlib.sha256(one.key.encode()).hexdigest().encode() in written
        assert one.key not in repr(one)
    assert len({one.key for one in issued}) == 3


def test_files_are_for_their_owner_alone(admin, path):
    old = os.umask(0)
    try:
        admin.add("a", {})
    finally:
        os.umask(old)
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "tenants-audit.jsonl", "tenants.json", "tenants.json.lock",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"requests_per_second": 0.0}, "requests_per_second"),
        ({"requests_per_second": 1e-310}, "requests_per_second"),
        ({"tokens_per_minute": -1}, "tokens_per_minute"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"cache_bytes": -1}, "cache_bytes"),
        ({"policy": "open"}, "policy"),
        ({"policy": "shared"}, "policy"),
        ({"group": "g"}, "group"),
        ({"policy": "group", "group": "Not A Name"}, "group"),
    ],
)
def test_wrong_fields_are_named_and_nothing_is_written(admin, path, fields, field):
    with pytest.raises(InvalidRequest) as caught:
        admin.add("a", fields)
    assert caught.value.field == field
    assert caught.value.limit
    assert not path.exists()
    assert (path.parent / "tenants-audit.jsonl").read_text() == ""


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a-", "x" * 64, "a\n"])
def test_names_are_plain(admin, name):
    with pytest.raises(InvalidRequest, match="name is"):
        admin.add(name, {})


def test_what_is_not_named_stays(admin):
    admin.add("a", {"requests_per_second": 2.0, "max_concurrent": 3, "policy": "group", "group": "g"})
    changed = admin.change("a", {"max_concurrent": None, "disabled": True})
    assert changed.limits == TenantLimits(requests_per_second=2.0)
    assert (changed.disabled, changed.policy, changed.group) == (True, "group", "g")
    changed = admin.change("a", {"policy": "isolated"})
    assert (changed.disabled, changed.policy, changed.group) == (True, "isolated", None)
    assert admin.tenants() == (changed,)


def test_unknown_names_and_keys_are_told_what_there_is(admin):
    key_id = admin.add("a", {}).key_id
    for act in (lambda: admin.remove("b"), lambda: admin.change("b", {}), lambda: admin.rotate("b", timedelta())):
        with pytest.raises(InvalidRequest, match="name is 'b'; there is no such tenant; there are: a"):
            act()
    with pytest.raises(InvalidRequest, match=f"--key is 'x'.*{key_id}"):
        admin.remove("a", "x")
    with pytest.raises(InvalidRequest, match="there is such a tenant already"):
        admin.add("a", {})


def test_rotation_keeps_some_old_keys_for_a_while_and_forgets_the_expired(admin):
    first = admin.add("a", {}).key_id
    second = admin.rotate("a", timedelta(hours=1)).key_id
    keys = {key.id: key for key in admin.tenants()[0].keys}
    assert keys[second].expires is None
    assert keys[first].is_live(now_utc() + timedelta(minutes=59))
    assert not keys[first].is_live(now_utc() + timedelta(minutes=61))
    admin.rotate("a", timedelta(hours=5))
    later = {key.id: key.expires for key in admin.tenants()[0].keys}
    assert later[first] == keys[first].expires  # no key lives longer than it was told
    third = admin.rotate("a", timedelta(0)).key_id
    assert [key.id for key in admin.tenants()[0].keys] == [third]


def test_live_keys_are_bounded(admin):
    admin.add("a", {})
    for _ in range(7):
        admin.rotate("a", timedelta(hours=1))
    with pytest.raises(InvalidRequest, match="keys is 8; at most 8"):
        admin.rotate("a", timedelta(hours=1))


def test_every_action_is_audited_and_refused_ones_are_not(admin):
    key_id = admin.add("a", {"max_concurrent": 2}).key_id
    admin.rotate("a", timedelta(hours=1))
    admin.change("a", {"max_concurrent": None, "disabled": True})
    admin.remove("a", key_id)
    with pytest.raises(InvalidRequest):
        admin.remove("b")
    admin.remove("a")
    lines = [json.loads(line) for line in admin.audit_path.read_text().splitlines()]
    assert [line["action"] for line in lines] == ["add", "rotate", "set", "remove_key", "remove"]
    assert all(set(line) == {"time", "actor", "action", "tenant", "changes"} for line in lines)
    assert {line["tenant"] for line in lines} == {"a"}
    assert lines[2]["changes"] == {"max_concurrent": None, "disabled": True}
    assert lines[3]["changes"] == {"key": key_id}


def test_a_file_of_another_format_is_not_touched(admin, path):
    admin.add("a", {})
    text = path.read_text().replace('"format":2', '"format":3')
    path.write_text(text)
    with pytest.raises(ConfigError, match="format"):
        admin.add("b", {})
    assert path.read_text() == text


def test_errors_of_a_file_do_not_show_what_is_in_it(admin, path):
    path.parent.mkdir()
    path.write_text('{"format": 1, "server_key": "a secret that is no key"}')
    with pytest.raises(ConfigError, match="server_key") as caught:
        read_registry(path)
    assert "secret" not in str(caught.value)


def test_a_broken_file_keeps_what_was_read_before_and_is_counted_once(admin, path):
    admin.add("a", {})
    failures, clock = [], Clock()
    follower = RegistryFollower(path, lambda: failures.append(1), clock)
    known = follower.current()
    assert [tenant.name for tenant in known.tenants] == ["a"]
    good = path.read_bytes()
    path.write_bytes(good[:-9])
    assert follower.current() is known  # not looked at within a second
    for _ in range(3):
        clock.now += 1.5
        assert follower.current() is known
    assert len(failures) == 1
    path.unlink()
    clock.now += 1.5
    assert follower.current() is known
    assert len(failures) == 2
    path.write_bytes(good)
    admin.add("b", {})
    clock.now += 1.5
    assert [tenant.name for tenant in follower.current().tenants] == ["a", "b"]
    assert len(failures) == 2


@given(
    st.integers(1, 50),
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60), st.booleans()), max_size=40),
)
def test_a_bucket_is_what_flows_in_less_what_is_taken(rate, capacity, steps):
    """The oracle goes tick by tick: 1/4 s each, all numbers exact in binary."""
    bucket, level, now = TokenBucket(rate, capacity, 0.0), float(capacity), 0.0
    for ticks, amount, is_forced in steps:
        for _ in range(ticks):
            level = min(float(capacity), level + rate / 4)
        now += ticks / 4
        assert bucket.level(now) == pytest.approx(level, abs=1e-9)
        wait_s = bucket.wait_s(amount, now)
        assert (wait_s == 0) == (level >= min(amount, capacity) - 1e-12)
        if wait_s > 0:
            assert level + wait_s * rate == pytest.approx(min(amount, capacity), abs=1e-9)
        if is_forced or wait_s == 0:
            bucket.take(amount, now)
            level -= amount


def admit(limiter, num_prompt_tokens, num_answers=1):
    with limiter.admitted(num_prompt_tokens, num_answers):
        pass


def refusal(limiter, num_prompt_tokens):
    with pytest.raises(OverLimit) as caught:
        admit(limiter, num_prompt_tokens)
    return caught.value


@given(st.floats(0.1, 100), st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_no_more_requests_pass_than_the_rate_and_one_burst(rate, gaps):
    clock, passed = Clock(), 0
    limiter = TenantLimiter(TenantLimits(requests_per_second=rate), clock=clock)
    for gap in gaps:
        clock.now += gap
        try:
            limiter.take_request()
            passed += 1
        except OverLimit as error:
            clock.now += error.retry_after_s + 1e-6
            limiter.take_request()  # who waits as told is served
            passed += 1
    assert passed <= max(1.0, rate) + rate * clock.now + 1e-3


def test_tokens_are_charged_for_the_prompt_and_settled_with_what_came_out():
    clock = Clock()
    limiter = TenantLimiter(TenantLimits(tokens_per_minute=60), clock=clock)
    with limiter.admitted(50, 1):
        limiter.spend(40)  # 30 more than there were
    refused = refusal(limiter, 10)
    assert (refused.limit_name, refused.retry_after_s) == ("tokens_per_minute", 40)
    clock.now = 40.0
    admit(limiter, 10)


def test_a_prompt_longer_than_a_minutes_tokens_waits_for_a_full_bucket_and_overdraws_it():
    clock = Clock()
    limiter = TenantLimiter(TenantLimits(tokens_per_minute=60), clock=clock)
    admit(limiter, 120)
    assert refusal(limiter, 1).retry_after_s == 61


def test_places_are_held_while_answers_are_under_way_and_given_back_whatever_happens():
    limiter = TenantLimiter(TenantLimits(max_concurrent=3))
    with limiter.admitted(1, 2):
        with pytest.raises(OverLimit, match="max_concurrent of 3"):
            admit(limiter, 1, 2)
        with limiter.admitted(1, 1):
            assert limiter.num_running == 3
    with pytest.raises(ZeroDivisionError), limiter.admitted(1, 2):
        _ = 1 // 0
    assert limiter.num_running == 0
    with pytest.raises(InvalidRequest, match="n is 4; the tenant may have at most 3"):
        admit(limiter, 1, 4)


def test_each_process_enforces_its_share_and_at_least_one_place():
    limits = TenantLimits(requests_per_second=8, tokens_per_minute=600, max_concurrent=2)
    limiter = TenantLimiter(limits, num_processes=4, clock=Clock())
    assert limiter.max_running == 1
    limiter.take_request()
    limiter.take_request()
    with pytest.raises(OverLimit) as caught:
        limiter.take_request()
    assert caught.value.retry_after_s == 0.5
    admit(limiter, 150)
    refusal(limiter, 1)


def test_changed_limits_do_not_give_back_what_was_used():
    clock = Clock()
    limiter = TenantLimiter(TenantLimits(tokens_per_minute=60), clock=clock)
    limiter.spend(60)
    limiter.change(TenantLimits(tokens_per_minute=600))
    assert refusal(limiter, 10).retry_after_s == 1
    limiter.change(TenantLimits())
    admit(limiter, 10**6, 100)


async def test_a_key_leads_to_its_tenant(admin, path):
    a, b = admin.add("a", {"max_concurrent": 2}), admin.add("b", {})
    keeper = gatekeeper(path)
    for issued in (a, b):
        tenant = await keeper.enter([f"Bearer {issued.key}"])
        assert (tenant.id, tenant.limits) == (issued.tenant.id, issued.tenant.limits)
    assert (await keeper.enter([f"bearer   {a.key} "])).id == a.tenant.id


async def test_refusals_are_told_apart_and_counted(admin, path):
    issued, other = admin.add("a", {"requests_per_second": 0.5}), admin.add("b", {})
    admin.change("b", {"disabled": True})
    metrics = GatewayMetrics()
    keeper = gatekeeper(path, metrics=metrics)
    bearer = f"Bearer {issued.key}"
    for values in ([], [""], ["Bearer"], ["Bearer "], [issued.key], [f"Basic {issued.key}"], [bearer, bearer]):
        with pytest.raises(Unauthenticated, match="is required"):
            await keeper.enter(values)
    for key in ("x", issued.key[:-1], issued.key + "0", issued.key.upper(), "é\udc80"):
        with pytest.raises(Unauthenticated, match="not known") as caught:
            await keeper.enter([f"Bearer {key}"])
        assert key not in str(caught.value) or key == "x"
    with pytest.raises(TenantDisabled):
        await keeper.enter([f"Bearer {other.key}"])
    await keeper.enter([bearer])
    with pytest.raises(OverLimit):
        await keeper.enter([bearer])
    assert refusals(metrics) == {"missing_key": 7, "unknown_key": 5, "disabled": 1, "requests_per_second": 1}


async def test_the_work_is_the_same_for_known_and_unknown_keys(admin, path, monkeypatch):
    issued, expired, disabled = admin.add("a", {}), admin.add("b", {}), admin.add("c", {})
    admin.rotate("b", timedelta(hours=1))
    admin.change("c", {"disabled": True})
    keeper = gatekeeper(path, clock=lambda: now_utc() + timedelta(hours=2))
    await keeper.enter([f"Bearer {issued.key}"])
    work = Counter()

    def counting(name, function):
        def call(*arguments):
            work[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(hmac, "compare_digest", counting("comparisons", hmac.compare_digest))
    monkeypatch.setattr(hashlib, "sha256", counting("digests", hashlib.sha256))
    for key in (issued.key, expired.key, disabled.key, "pl-0-0", issued.key[:-1] + "x"):
        work.clear()
        with contextlib.suppress(Unauthenticated, TenantDisabled):
            await keeper.enter([f"Bearer {key}"])
        assert work == {"comparisons": 1, "digests": 1}


async def test_gateways_follow_the_file(admin, path):
    old = admin.add("a", {"requests_per_second": 0.001})
    keeper = gatekeeper(path)
    await keeper.enter([f"Bearer {old.key}"])
    new = admin.rotate("a", timedelta(0))
    look_again(keeper)
    with pytest.raises(Unauthenticated):
        await keeper.enter([f"Bearer {old.key}"])
    with pytest.raises(OverLimit):  # a new key is no new allowance
        await keeper.enter([f"Bearer {new.key}"])
    admin.remove("a")
    look_again(keeper)
    with pytest.raises(Unauthenticated):
        await keeper.enter([f"Bearer {new.key}"])


async def test_a_new_key_is_known_at_once(admin, path):
    """Another gateway may have seen it, and its owner used it there."""
    admin.add("a", {})
    keeper = gatekeeper(path)
    issued = admin.add("b", {})
    assert (await keeper.enter([f"Bearer {issued.key}"])).id == issued.tenant.id


async def test_without_a_registry_all_are_let_in_until_there_is_one_and_never_again(admin, path):
    keeper = gatekeeper(path, may_be_open=True)
    assert await keeper.enter([]) is None
    assert await keeper.enter(["Bearer whatever"]) is None
    issued = admin.add("a", {})
    look_again(keeper)
    with pytest.raises(Unauthenticated):
        await keeper.enter([])
    path.unlink()
    look_again(keeper)
    with pytest.raises(Unauthenticated):
        await keeper.enter([])
    assert (await keeper.enter([f"Bearer {issued.key}"])).id == issued.tenant.id


def test_a_gateway_that_must_ask_for_keys_does_not_start_without_a_registry(path):
    with pytest.raises(ConfigError, match="there are no tenants"):
        gatekeeper(path)


async def test_namespaces_follow_the_policy(path):
    admin = TenantAdministration(path, allow_shared=True)
    fields = {
        "alone": {},
        "alone2": {},
        "public": {"policy": "promoted"},
        "g1": {"policy": "group", "group": "g"},
        "g2": {"policy": "group", "group": "g"},
        "h": {"policy": "group", "group": "h"},
        "all1": {"policy": "shared"},
        "all2": {"policy": "shared"},
    }
    keys = {name: admin.add(name, one).key for name, one in fields.items()}

    async def namespaces(shared):
        keeper = gatekeeper(path, shared=shared)
        return {name: (await keeper.enter([f"Bearer {key}"])).sharing.namespace for name, key in keys.items()}

    found = await namespaces(shared=True)
    assert found["g1"] == found["g2"]
    assert found["all1"] == found["all2"]
    assert len(set(found.values())) == 6
    assert "" not in found.values()
    assert await namespaces(shared=True) == found  # as long as the registry lives
    assert len(set((await namespaces(shared=False)).values())) == 7  # shared must be allowed by name


async def test_a_tenant_added_again_finds_nothing_of_its_namesake(admin, path):
    namespaces = set()
    for _ in range(2):
        key = admin.add("a", {}).key
        namespaces.add((await gatekeeper(path).enter([f"Bearer {key}"])).sharing.namespace)
        admin.remove("a")
    assert len(namespaces) == 2


def access_of(home, **sections):
    return tenant_access(ClusterConfig.model_validate(sections), home)


def test_open_on_loopback_alone_and_with_a_warning(tmp_path):
    for host in ("127.0.0.1", "::1", "localhost"):
        access, warning = access_of(tmp_path, gateway={"host": host})
        assert access.may_be_open
        assert "without a key" in warning
    with pytest.raises(ConfigError, match=r"gateway.host is '0.0.0.0'.*paceline tenant add"):
        access_of(tmp_path, gateway={"host": "0.0.0.0"})
    access, warning = access_of(tmp_path, gateway={"host": "0.0.0.0"}, tenants={"open": True})
    assert access.may_be_open
    assert "tenants.open" in warning


def test_a_file_that_is_named_must_be_there(tmp_path):
    file = tmp_path / "t.json"
    with pytest.raises(ConfigError, match=r"tenants\.file is"):
        access_of(tmp_path, tenants={"file": str(file)})
    TenantAdministration(file).add("a", {})
    access, warning = access_of(tmp_path, tenants={"file": str(file)}, gateway={"host": "0.0.0.0"})
    assert (access.file, access.may_be_open, warning) == (file, False, None)


def test_with_tenants_keys_are_asked_for_even_where_it_might_be_open(tmp_path):
    TenantAdministration(tmp_path / "tenants.json").add("a", {})
    access, _ = access_of(tmp_path, tenants={"open": True})
    assert not access.may_be_open
    TenantAdministration(tmp_path / "tenants.json").remove("a")
    access, warning = access_of(tmp_path)
    assert not access.may_be_open
    assert "nobody is served" in warning
