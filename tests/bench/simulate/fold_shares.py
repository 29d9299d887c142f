"""Which of several routers fold the namespaces that all of them write to, and what they ask of the server.

    python -m tests.bench.simulate.fold_shares [--routers 1 4 16] [--seconds 40] [--seed 0]

A server of its own, 8 namespaces with two entries in each between folds, and all times a tenth of production's. Each
router is a thread that folds, with a connection of its own; they begin one after the other. After half of the time
the router with the most folds is stopped without giving its leases back. Counted in each half: folds by router,
scripts at the server a second, and the longest time without a fold of a namespace; both in production's seconds.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import numpy as np

from cache_service.log.compactor import Compactor, CompactorSettings, CompactorThread
from cache_service.store.connection import Connection, ConnectionSettings
from cache_service.store.embedded_server import EmbeddedServer
from cluster.cli.table import plain_table
from tests.bench.simulate.follower_costs import BUSY_NAMESPACES, begin_epochs, entry, names, opener

FASTER = 10
SETTINGS = CompactorSettings(lease_s=30 / FASTER, fold_every_s=10 / FASTER)
BEGIN_S = 8.0 / FASTER  # from the first router's first write to the last one's, on average
_WRITE_EVERY_S = SETTINGS.fold_every_s / 2


class Router:
    """The compactors of one router."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._thread = CompactorThread(opener(settings), SETTINGS)
        self._compactors: dict[str, Compactor] = {}

    def write(self, name: str) -> None:
        """As where a router has published."""
        if name not in self._compactors:
            self._compactors[name] = self._thread.compact(name)
        elif self._compactors[name].rests:
            self._thread.wake(name, self._compactors[name])

    def folds(self) -> dict[str, int]:
        return {name: each.counters.folds for name, each in self._compactors.items()}

    def stop(self) -> None:
        self._thread.close()


def scripts(connection: Connection) -> int:
    return int(connection.client().info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


def write(settings: ConnectionSettings, routers: list[Router], seconds: float) -> float:
    """Write to all namespaces. Returns the longest time in which one of them was not folded."""
    rng, opened = np.random.default_rng(0), [opener(settings)(name) for name in names()[:BUSY_NAMESPACES]]
    began = time.monotonic()
    last = dict.fromkeys(names()[:BUSY_NAMESPACES], (began, -1))
    number, longest_s = 0, 0.0
    while (now := time.monotonic()) < began + seconds:
        for name, (store, codec) in zip(last, opened, strict=True):
            store.append([entry(codec, number, 1, 64, rng)], 100_000)
            for router in routers:
                router.write(name)
        while time.monotonic() < min(now + _WRITE_EVERY_S, began + seconds):
            time.sleep(_WRITE_EVERY_S / 10)
            for name, (since, before) in last.items():
                folds = sum(router.folds()[name] for router in routers)
                if folds != before:
                    last[name] = time.monotonic(), folds
                longest_s = max(longest_s, time.monotonic() - since)
        number += 1
    return longest_s


def measured(settings: ConnectionSettings, count: int, seconds: float, rng: random.Random) -> list[list[str]]:
    connection = Connection(settings)
    connection.client().flushall()
    begin_epochs(settings, BUSY_NAMESPACES)
    routers, rows = [], []
    for _ in range(count):
        routers.append(Router(settings))
    for router in routers:
        for name in names()[:BUSY_NAMESPACES]:
            router.write(name)
        time.sleep(rng.random() * 2 * BEGIN_S / count)
    before_folds, before, began = [0] * count, scripts(connection), time.monotonic()
    for half in ("all at work", "one is lost")[:count]:
        longest_s = write(settings, routers, seconds / 2)
        folds = [sum(router.folds().values()) for router in routers]
        done = [now - then for now, then in zip(folds, before_folds, strict=True)]
        asked, took_s = scripts(connection) - before, time.monotonic() - began
        rows.append(
            [
                str(count),
                half,
                str(sum(done)),
                " ".join(map(str, sorted(done, reverse=True))),
                f"{max(done) / max(1, sum(done)):.2f}",
                f"{asked / took_s / FASTER:.1f}",
                f"{longest_s * FASTER:.0f}",
            ]
        )
        if half == "all at work" and count > 1:
            lost = routers[folds.index(max(folds))]
            lost.stop()
        before_folds, before, began = folds, scripts(connection), time.monotonic()
    for router in routers:
        router.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, rows = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder)) as server:
        for count in options.routers:
            rows += measured(server.settings, count, options.seconds, rng)
    header = ("routers", "", "folds", "by router", "largest share", "scripts/s", "longest without a fold, s")
    print(plain_table(f"Folds of {BUSY_NAMESPACES} namespaces", header, rows))


if __name__ == "__main__":
    main()
