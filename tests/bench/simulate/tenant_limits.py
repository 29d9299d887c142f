"""How exact the limits of tenants are over all gateways, in simulated time, and what they cost.

    python -m tests.bench.simulate.tenant_limits [--gateways 2 10 50]

shares: each gateway enforces an equal part of the limit, as without a store. leases: each spends its part of what is
left. Loads are Poisson arrivals at three times the limit; of skewed ones gateway i has a part of 1 / i^2. Errors by
size of request are those of 48 runs with leases: 2 to 50 gateways, even and skewed, 0.9 to 3 times the limit. Places
are those of `max_concurrent`, with answers of 5 s in the mean.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from statistics import mean

from cache_service.store.connection import Connection
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cli.table import plain_table
from cluster.gateway.observability.metrics import GatewayMetrics
from cluster.tenants.access import TenantAccess
from cluster.tenants.administration import TenantAdministration
from cluster.tenants.gatekeeper import Gatekeeper
from cluster.tenants.lease import Report
from cluster.tenants.lease_store import LeaseStore
from cluster.tenants.place_store import PlaceStore
from cluster.tenants.places import PlacesReport
from paceline_testing.leases import Load, admitted, fresh_bucket
from paceline_testing.places import PlacesLoad, places_used
from tests.bench.simulate.control_costs import seconds_of

_LIMITS = {
    "20 requests a second": {"rate": 20.0, "burst": 20.0, "size": 1.0},
    "200,000 tokens a minute": {"rate": 200_000 / 60, "burst": 200_000.0, "size": 600.0},
}
_BY_SIZE = {
    "20 requests a second": {"rate": 20.0, "burst": 20.0, "size": 1.0},
    "5 requests a second": {"rate": 5.0, "burst": 5.0, "size": 1.0},
    "1 request a second": {"rate": 1.0, "burst": 1.0, "size": 1.0},
    "1 request in two seconds": {"rate": 0.5, "burst": 1.0, "size": 1.0},
    **{
        f"requests of {100 * part:g} % of a minute's tokens": {
            "rate": 200_000 / 60, "burst": 200_000.0, "size": part * 200_000
        }
        for part in (0.003, 0.02, 0.05)
    },
}  # fmt: skip


def largest_errors(name: str) -> list[str]:
    """Of a minute, of a run's mean, and of the mean of all runs, as differences of the limit."""
    runs = []
    for gateways, skew, over in product((2, 3, 5, 10, 20, 50), (0.0, 2.0), (0.9, 1.0, 1.1, 3.0)):
        limit = _BY_SIZE[name]
        load = Load(**limit, demand=over * limit["rate"], gateways=gateways, skew=skew, minutes=6)
        ours, ideal, _ = admitted(load)
        runs.append([(one - other) / (60 * load.rate) for one, other in zip(ours[2:], ideal[2:], strict=True)])
    figures = (
        max(chain(*runs), key=abs),
        max(map(mean, runs), key=abs),
        mean(map(mean, runs)),
    )
    return [f"{100 * one:+.1f} %" for one in figures]


def errors(name: str, gateways: int, skew: float) -> list[str]:
    """Largest differences in a minute from what one gateway would admit, of the limit."""
    cells = []
    for leases in (False, True):
        load = Load(
            **_LIMITS[name], demand=3 * _LIMITS[name]["rate"], gateways=gateways, skew=skew, minutes=6, leases=leases
        )
        ours, ideal, _ = admitted(load)
        differences = [(one - other) / (60 * load.rate) for one, other in zip(ours[2:], ideal[2:], strict=True)]
        cells.append(f"{100 * max(differences, key=abs):+.1f} %")
    return cells


def places_row(limit: int, gateways: int, skew: float) -> list[str]:
    """Places in use at three times the limit, in the mean and at most, and calls of the store with leases; and the
    share of the requests that wait for one at 0.6 of the limit."""
    load = PlacesLoad(limit, demand=3.0 * limit, gateways=gateways, skew=skew)
    below = places_used(replace(load, demand=0.6 * limit))
    leases, shares = places_used(load), places_used(replace(load, leases=False))
    used = (f"{one.mean / limit:.2f}, {one.most}" for one in (shares, leases))
    waits = (one.waits / one.requests for one in (leases, below))
    return [
        str(limit),
        str(gateways),
        f"{skew:g}",
        f"{leases.mean_ideal / limit:.2f}",
        *used,
        f"{leases.calls / load.seconds / gateways:.2f}",
        *(f"{one:.2f}" for one in waits),
        f"{below.requests / load.seconds / gateways:.1f}",
    ]


def gatekeeper_us(requests_per_second: float) -> float:
    """Of a call: key, request, prompt of 100 tokens, and 20 chunks of an answer."""
    with tempfile.TemporaryDirectory() as folder:
        file, metrics = Path(folder) / "tenants.json", GatewayMetrics()
        limits = {"requests_per_second": requests_per_second, "tokens_per_minute": 10**12, "max_concurrent": 8}
        key = TenantAdministration(file).add("a", limits).key
        access = TenantAccess(file, may_be_open=False)
        keeper = Gatekeeper(access, 2, metrics.tenant_refusals, metrics.tenant_registry_failures)

        def call() -> None:
            try:
                keeper.enter([f"Bearer {key}"]).send(None)
            except StopIteration as done:  # it has waited for nothing
                tenant = done.value
            with tenant.limiter.admitted(100, 1):
                for _ in range(20):
                    tenant.limiter.spend(1)

        return 1e6 * seconds_of(call)


def bucket_us() -> tuple[float, float]:
    """Of a decision with a lease: passed and taken; and of a report and its answer, in the gateway."""
    bucket, store = fresh_bucket(1e6, 1e9, 2)

    def decide() -> None:
        now = time.monotonic()
        if bucket.wait_s(1, now) == 0:
            bucket.ask(1)
            bucket.take(1, now)

    def renew() -> None:
        now = time.monotonic()
        bucket.renew(store.renew(bucket.report(now), now), now)

    renew()
    return 1e6 * seconds_of(decide), 1e6 * seconds_of(renew)


def places_rows() -> list[list[str]]:
    """Of one report of places with so many gateways, each of which holds one of a tenant, at a server of its own."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder)) as server:
        connection, report = Connection(server.settings), {"tenant": PlacesReport(1000, 0, 1, 1.0)}
        for gateways in (2, 10, 50, 200):
            stores = [PlaceStore(connection) for _ in range(gateways)]
            for store in stores:
                store.renew(report)
            before = connection.client().info("cpu")
            for number in range(1000):
                stores[number % gateways].renew(report)
            after = connection.client().info("cpu")
            server_s = sum(after[key] - before[key] for key in ("used_cpu_user", "used_cpu_sys"))
            rows.append([str(gateways), f"{1e3 * server_s:.0f}"])
    return rows


def store_rows() -> list[list[str]]:
    """Of one renewal with so many tenants of two limits each, at a server of its own."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder)) as server:
        connection = Connection(server.settings)
        leases, report = LeaseStore(connection), Report(100.0, 6000.0, spent=1.0, asked=1.0, level=6000.0)
        for tenants in (1, 100, 1000):
            reports = {f"{n:08x}": {"tokens_per_minute": report, "requests_per_second": report} for n in range(tenants)}
            leases.renew(reports)
            before = connection.client().info("cpu")
            began, rounds = time.perf_counter(), max(5, 2000 // tenants)
            gateway_s = time.process_time()
            for _ in range(rounds):
                leases.renew(reports)
            took, gateway_s = time.perf_counter() - began, time.process_time() - gateway_s
            after = connection.client().info("cpu")
            server_s = sum(after[key] - before[key] for key in ("used_cpu_user", "used_cpu_sys"))
            figures = (took, gateway_s, server_s)
            rows.append([str(tenants), *(f"{1e3 * one / rounds:.2f}" for one in figures)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gateways", type=int, nargs="+", default=[2, 10, 50])
    arguments = parser.parse_args()
    rows = [
        [name, str(gateways), f"{skew:g}", *errors(name, gateways, skew)]
        for name in _LIMITS
        for gateways in arguments.gateways
        for skew in (0.0, 2.0)
    ]
    print(plain_table("Error of the total, of the limit", ("limit", "gateways", "skew", "shares", "leases"), rows))
    rows = [places_row(*one) for one in product((8, 100, 1000), arguments.gateways, (0.0, 2.0))]
    header = (
        "limit",
        "gateways",
        "skew",
        "one gateway",
        "shares",
        "leases",
        "calls a second and gateway",
        "requests that wait",
        "at 0.6 of the limit",
        "requests a second and gateway",
    )
    print(plain_table("Places in use, of the limit, and at most", header, rows))
    header = ("limit", "a minute", "a run", "all runs")
    by_size = [[name, *largest_errors(name)] for name in _BY_SIZE]
    print(plain_table("Largest errors with leases, and the mean of all runs", header, by_size))
    print(f"gatekeeper: {gatekeeper_us(1e6):.1f} us a call with 20 chunks")
    print("with a lease: {:.2f} us a decision, {:.2f} us a report and its answer".format(*bucket_us()))
    header = ("tenants", "call, ms", "gateway, ms", "server, ms")
    print(plain_table("One renewal", header, store_rows()))
    print(plain_table("One report of a tenant's places", ("gateways", "server, us"), places_rows()))


if __name__ == "__main__":
    main()
