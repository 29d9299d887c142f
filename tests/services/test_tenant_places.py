"""Leases of tenants' places at a real server: its arithmetic, and processes that ask for more than there are."""

import asyncio
import multiprocessing
import random
import sys
import threading
import time

import pytest

from actors.errors import InvalidRequest
from cache_service.errors import StoreError, StoreUnavailable
from cache_service.store.connection import Connection
from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.simulate.tenant_leases import StoredPlaces
from cluster.tenants import place_store
from cluster.tenants.access import TenantAccess
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.errors import OverLimit
from cluster.tenants.gatekeeper import Gatekeeper
from cluster.tenants.lease_store import LeaseStore
from cluster.tenants.limiter import TenantLimiter
from cluster.tenants.place_store import PlaceStore
from cluster.tenants.places import PlacesReport
from cluster.tenants.registry import TenantLimits
from cluster.tenants.renewal import LeaseRenewal

LIMIT, NUM_GATEWAYS, SECONDS = 7, 4, 4.0


def test_the_server_reckons_as_the_simulation_does(server):
    connection, stored, random_ = Connection(server.settings), StoredPlaces(), random.Random(0)
    gateways, held = [PlaceStore(connection) for _ in range(4)], [0] * 4
    for _ in range(100):
        gateway = random_.randrange(4)
        kept = random_.randint(0, held[gateway])
        report = PlacesReport(random_.choice([10, 10, 6]), kept, kept + random_.randint(0, 6), asked=random_.random())
        told, expected = gateways[gateway].renew({"a": report})["a"], stored.renew(gateway, report, 0.0)
        assert (told.held, told.left) == (expected.held, expected.left)
        assert told.asked == pytest.approx(expected.asked, rel=0.2)  # demand is forgotten as time passes
        held[gateway] = told.held
    connection.client().hset("sd:{limits}:a:max_concurrent", mapping={"held": 99, "sweep": "1e12"})  # counted afresh
    assert gateways[0].renew({"a": PlacesReport(99, held[0], 99, 0.0)})["a"].held == 99 - sum(held[1:])
    many = {f"t{number}": PlacesReport(3, 0, 1, 1.0) for number in range(250)}
    assert {told.held for told in gateways[0].renew(many).values()} == {1}


def test_places_of_a_gateway_that_is_gone_expire(server, monkeypatch):
    monkeypatch.setattr(place_store, "_LIFE_MS", 300)
    connection = Connection(server.settings)
    PlaceStore(connection).renew({"a": PlacesReport(5, 0, 5, 1.0)})
    other, began = PlaceStore(connection), time.monotonic()
    while not other.renew({"a": PlacesReport(5, 0, 5, 1.0)})["a"].held:
        assert time.monotonic() - began < 10
        time.sleep(0.02)
    assert time.monotonic() - began > 0.2


def test_nonsense_and_absence_are_outages(server):
    connection = Connection(server.settings)
    key, report = "sd:{limits}:a:max_concurrent", PlacesReport(5, 0, 5, 1.0)
    for values in ({"asked": "none"}, {"asked": "nan", "time": "1"}, {"sweep": "soon"}):
        connection.client().delete(key)
        connection.client().hset(key, mapping=values)
        with pytest.raises(StoreError):
            PlaceStore(connection).renew({"a": report})
    connection.client().set(key, "no hash")
    with pytest.raises(StoreError):
        PlaceStore(connection).renew({"a": report})
    server.stop()
    with pytest.raises(StoreUnavailable):
        PlaceStore(connection).renew({"a": report})


def test_a_report_that_comes_after_a_later_one_changes_nothing(server):
    connection = Connection(server.settings)
    places, other = PlaceStore(connection), PlaceStore(connection)
    places.renew({"a": PlacesReport(8, 0, 2, 1.0)})
    places.renew({"a": PlacesReport(8, 2, 6, 1.0)})
    places._num_calls -= 2
    with pytest.raises(StoreError):  # its answer is for nobody
        places.renew({"a": PlacesReport(8, 0, 0, 1.0)})
    assert other.renew({"a": PlacesReport(8, 0, 8, 1.0)})["a"].held == 2


def test_a_report_that_is_repeated_gets_the_same_places(server):
    """Others have given back theirs meanwhile."""
    connection = Connection(server.settings)
    places, other = PlaceStore(connection), PlaceStore(connection)
    other.renew({"a": PlacesReport(8, 0, 6, 1.0)})
    report = PlacesReport(8, 0, 4, 1.0)
    assert places.renew({"a": report})["a"].held == 2
    other.renew({"a": PlacesReport(8, 0, 0, 1.0)})
    places._num_calls -= 1
    repeated = places.renew({"a": report})["a"]
    assert (repeated.held, repeated.left) == (2, 6)
    assert other.renew({"a": PlacesReport(8, 0, 8, 1.0)})["a"].held == 6


@pytest.fixture
def patient(monkeypatch):
    """However busy the machine is, a lease comes in time."""
    monkeypatch.setattr("cluster.tenants.renewal.FIRST_WAIT_S", 10.0)


async def test_one_gateway_of_ten_serves_all_answers_of_a_tenant_and_its_share_in_an_outage(server, tmp_path, patient):
    key = TenantAdministration(tmp_path / "t.json").add("a", {"max_concurrent": 8, "requests_per_second": 1000}).key
    access, metrics, tasks, keepers = TenantAccess(tmp_path / "t.json", may_be_open=False), GatewayMetrics(), [], []
    for _ in range(2):
        connection = Connection(server.settings)
        renewal = LeaseRenewal(LeaseStore(connection), PlaceStore(connection))
        tasks.append(asyncio.create_task(renewal.run()))
        failures = metrics.tenant_registry_failures
        keepers.append(Gatekeeper(access, 10, metrics.tenant_refusals, failures, renewal=renewal))

    async def begin(keeper):
        tenant = await keeper.enter([f"Bearer {key}"])
        await keeper.await_places(tenant, 1)
        place = tenant.limiter.admitted(1, 1)
        place.__enter__()
        return place

    places = [await begin(keepers[0]) for _ in range(8)]
    for keeper in keepers:
        with pytest.raises(OverLimit):
            await begin(keeper)
    places.pop().__exit__(None, None, None)
    until = time.monotonic() + 20
    while True:  # the place comes to the other gateway when the first one has reported
        try:
            (await begin(keepers[1])).__exit__(None, None, None)
            break
        except OverLimit:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
    while places:
        places.pop().__exit__(None, None, None)
    server.stop()
    until = time.monotonic() + 20
    while True:
        tenant = await keepers[0].enter([f"Bearer {key}"])
        if tenant.limiter.max_running == 1:  # of 8 at ten gateways
            break
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()


async def test_a_first_call_for_more_answers_than_a_share_is_not_invalid_while_the_server_is_slow(server, tmp_path):
    key = TenantAdministration(tmp_path / "t.json").add("a", {"max_concurrent": 8}).key
    access, metrics = TenantAccess(tmp_path / "t.json", may_be_open=False), GatewayMetrics()
    connection = Connection(server.settings)
    places, answers = PlaceStore(connection), threading.Event()

    class Slow:
        def renew(self, reports):
            answers.wait()
            return places.renew(reports)

    renewal = LeaseRenewal(LeaseStore(connection), Slow())
    running = asyncio.create_task(renewal.run())
    refusals, failures = metrics.tenant_refusals, metrics.tenant_registry_failures
    tenant = await Gatekeeper(access, 10, refusals, failures, renewal=renewal).enter([f"Bearer {key}"])
    await renewal.places("a", tenant.limiter, 4)
    with pytest.raises(OverLimit):
        tenant.limiter.admitted(1, 4).__enter__()
    with pytest.raises(InvalidRequest, match="at most 8"):
        tenant.limiter.admitted(1, 9).__enter__()
    answers.set()
    until = time.monotonic() + 20
    while True:
        await renewal.places("a", tenant.limiter, 4)
        try:
            with tenant.limiter.admitted(1, 4):
                break
        except OverLimit:
            assert time.monotonic() < until
    running.cancel()


def gateway(settings, number, end, total, most, results):
    """Begins sequences as fast as it can, the first gateway most of them, and counts those of all gateways."""
    places, limiter = PlaceStore(Connection(settings)), TenantLimiter(TenantLimits(max_concurrent=LIMIT), NUM_GATEWAYS)
    renewed, running, num_begun, rng = 0.0, [], 0, random.Random(number)
    while (now := time.time()) < end:
        for ended in [one for one in running if one[0] <= now]:
            running.remove(ended)
            with total.get_lock():  # it is over before its place is free
                total.value -= 1
            ended[1].__exit__(None, None, None)
        asks = limiter.should_ask_for_places(1)
        if now - renewed > 0.1 or asks:
            renewed = now
            with limiter.waiting_for_places(1 if asks else 0):
                if report := limiter.places_report():
                    limiter.renew_places(places.renew({"tenant": report})["tenant"])
        try:
            place = limiter.admitted(1, 1)
            place.__enter__()
            num_begun += 1
            running.append((now + rng.uniform(0.01, 0.2), place))
            with total.get_lock():
                total.value += 1
                most.value = max(most.value, total.value)
        except OverLimit:
            pass
        time.sleep(0.002 * 4**number)
    results.put(num_begun)


def test_processes_with_very_different_traffic_never_exceed_the_limit_together(server):
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    total, most, results = context.Value("i", 0), context.Value("i", 0), context.Queue()
    end = time.time() + SECONDS
    processes = [
        context.Process(target=gateway, args=(server.settings, number, end, total, most, results))
        for number in range(NUM_GATEWAYS)
    ]
    for process in processes:
        process.start()
    counts = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert most.value == LIMIT, (most.value, counts)
    assert max(counts) > 1.5 * sum(counts) / NUM_GATEWAYS, counts
