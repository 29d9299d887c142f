"""Leases of tenants' limits at a real server: its arithmetic, and processes that ask for more than the limit."""

import multiprocessing
import sys
import time

import pytest

from cache_service.errors import StoreUnavailable
from cache_service.store.connection import Connection
from cluster.simulate.tenant_leases import StoredBucket
from cluster.tenants.errors import OverLimit
from cluster.tenants.lease import Report
from cluster.tenants.lease_store import LeaseStore
from cluster.tenants.limiter import TenantLimiter
from cluster.tenants.registry import TenantLimits

LIMITS = TenantLimits(requests_per_second=50, tokens_per_minute=6000)
NUM_GATEWAYS = 4
SECONDS = 2.5


def test_the_server_reckons_as_the_simulation_does(server):
    leases, bucket = LeaseStore(Connection(server.settings)), StoredBucket()
    reports = [
        Report(rate=0.0001, capacity=60.0, spent=spent, asked=asked, level=level)
        for spent, asked, level in [(0, 1, 45.5), (7.25, 8, 3), (100, 100, 3), (0, 0, 3)]
    ]
    for report in reports:
        other = Report(rate=1.0, capacity=1e12, spent=5.0, asked=0.0, level=1e12)
        told = leases.renew({"a": {"tokens": report}, "b": {"tokens": other}})["a"]["tokens"]
        expected = bucket.renew(report, 0.0)
        assert told.level == pytest.approx(expected.level, abs=1e-3)
        assert told.asked == pytest.approx(expected.asked, rel=0.2)  # demand is forgotten as time passes
    many = {f"t{number}": {"tokens": reports[0]} for number in range(450)}
    assert set(leases.renew(many)) == set(many)


def test_nonsense_and_absence_are_outages(server):
    connection = Connection(server.settings)
    report = Report(rate=1.0, capacity=60.0, spent=0.0, asked=1.0, level=60.0)
    connection.client().set("sd:{limits}:a:tokens", "no hash")
    with pytest.raises(Exception, match="refuses"):
        LeaseStore(connection).renew({"a": {"tokens": report}})
    connection.client().hset("sd:{limits}:b:tokens", mapping={"level": "1", "asked": "nan", "time": "1"})
    with pytest.raises(StoreUnavailable):
        LeaseStore(connection).renew({"b": {"tokens": report}})
    server.stop()
    with pytest.raises(StoreUnavailable):
        LeaseStore(connection).renew({"c": {"tokens": report}})


class LateAnswers(Connection):
    """A server that does what it is told and answers too late, or does it later still."""

    def __init__(self, settings, still_to_come):
        super().__init__(settings)
        self.is_late, self.still_to_come, self.late_calls = False, still_to_come, []

    def client(self):
        real, outer = super().client(), self

        class Late:
            def evalsha(self, *arguments):
                if not outer.is_late:
                    return real.evalsha(*arguments)
                outer.late_calls.append(arguments)
                if not outer.still_to_come:
                    real.evalsha(*arguments)
                raise TimeoutError

            def __getattr__(self, name):
                return getattr(real, name)

        return Late()


@pytest.mark.parametrize("still_to_come", [False, True])
def test_what_is_spent_counts_once_however_often_it_is_said(server, still_to_come):
    connection = LateAnswers(server.settings, still_to_come)
    leases = LeaseStore(connection)

    def level(spent, name="a"):
        report = Report(rate=1e-6, capacity=1000.0, spent=spent, asked=0.0, level=1000.0)
        return leases.renew({name: {"tokens": report}})[name]["tokens"].level

    assert level(0.0) == pytest.approx(1000)
    assert level(0.0, "b") == pytest.approx(1000)
    connection.is_late = True
    for spent in (10.0, 15.0, 20.0):  # the second and third say it again, with what has come since
        with pytest.raises(StoreUnavailable):
            level(spent)
    connection.is_late = False
    assert level(5.0, "b") == pytest.approx(995)  # a report that does not name it
    for arguments in connection.late_calls:
        connection.client().evalsha(*arguments)
    assert level(22.0) == pytest.approx(978)
    assert level(1.0) == pytest.approx(977)


def gateway(settings, number, begin, end, results):
    """Asks for as much as it can; the first gateway for most of it."""
    leases, limiter = LeaseStore(Connection(settings)), TenantLimiter(LIMITS, NUM_GATEWAYS)
    renewed, counts, pause_s = 0.0, [], 0.002 * 4**number
    while (now := time.time()) < end:
        if now - renewed > 0.25:
            renewed = now
            limiter.renew(leases.renew({"tenant": limiter.reports(True)})["tenant"])
        try:
            limiter.take_request()
            counts.append(now)
        except OverLimit:
            pass
        time.sleep(pause_s)
    results.put(sum(begin <= at for at in counts))


def test_processes_with_very_different_traffic_together_meet_the_limit(server):
    begin = time.time() + 0.5
    end = begin + SECONDS
    Connection(server.settings).client().hset(
        "sd:{limits}:tenant:requests_per_second", mapping={"level": 0, "asked": 0, "time": time.time()}
    )  # the burst is gone
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    results = context.Queue()
    processes = [
        context.Process(target=gateway, args=(server.settings, number, begin, end, results))
        for number in range(NUM_GATEWAYS)
    ]
    for process in processes:
        process.start()
    counts = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    # Besides the 5 %, in so short a time, what the bucket holds at its begin and end: two leases' worth.
    assert sum(counts) == pytest.approx(50 * SECONDS, abs=50 * (0.05 * SECONDS + 0.5)), counts
    assert max(counts) > 1.5 * sum(counts) / NUM_GATEWAYS, counts
