"""What the control plane costs as groups and tenants grow: functions of production in one process, without a network.

    python -m tests.bench.simulate.control_costs [--groups 10 100 1000] [--tenants 1000 10000 100000]

directory: one named actor, which every router asks four times a second, and which answers with all workers. choice: of
a router for one request, with Serve's part. registry: one file, which every gateway reads again when it changes.
"""

from __future__ import annotations

import argparse
import pickle
import random
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from actors.links.keys import LinkAddress, LinkKeys
from actors.workers.directory import Directory, WorkerEntry
from cluster.cli.table import plain_table
from cluster.routing.replica_choice import ready_first
from cluster.tenants.keys import key_digest, new_key
from cluster.tenants.registry import Registry, StoredKey, StoredTenant
from cluster.tenants.registry_file import read_registry, write_registry

_FOLLOWS_S = 4.0  # calls a second of a router: see `cluster.router.connections.keep_connected`


def seconds_of(action: Callable[[], object], least_s: float = 0.5) -> float:
    """Processor time of a call, over many of them."""
    count, began = 0, time.process_time()
    while (spent := time.process_time() - began) < least_s:
        action()
        count += 1
    return spent / count


def directory_row(groups: int) -> list[str]:
    directory = Directory(LinkKeys.generate(), ttl_s=1e9)  # nothing expires while it is measured
    keys = LinkKeys.generate()
    for number in range(groups):
        address = LinkAddress(f"tcp://10.0.0.1:{20_000 + number % 40_000}", keys.public)
        directory.heartbeat(WorkerEntry("target", f"target-{number}", address, number, model="model"))
    routers = [f"router-{number}" for number in range(groups)]
    held = {router: directory.claim_target(router, None, "model") for router in routers}
    drawn = random.Random(0)

    def follow() -> None:
        router = drawn.choice(routers)
        directory.workers()
        directory.claim_target(router, held[router], "model")

    follow_s = seconds_of(follow)
    answer = len(pickle.dumps(directory.workers()))
    return [
        f"{follow_s * 1e6:,.0f}",
        f"{follow_s * groups * _FOLLOWS_S:.3f}",
        f"{answer * groups * _FOLLOWS_S / 1e6:,.1f}",
    ]


def choice_row(groups: int) -> list[str]:
    routers = [f"router-{number}" for number in range(groups)]
    ready, lengths = set(routers), dict.fromkeys(routers, 3)

    def choose() -> None:
        rank = ready_first(routers, ready.__contains__, random.sample)[0]
        min(rank, key=lengths.__getitem__)

    return [f"{seconds_of(choose) * 1e6:,.0f}"]


def registry_row(tenants: int) -> list[str]:
    now = datetime.now(UTC)
    stored = []
    for number in range(tenants):
        digest = key_digest(new_key(f"{number:08x}"))
        key = StoredKey(id=f"{number:08x}", sha256=digest.hex(), last4="0000", created=now)
        stored.append(StoredTenant(id=f"{number:08x}", name=f"tenant-{number}", created=now, keys=(key,)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.json"
        began = time.process_time()
        write_registry(file, Registry(tenants=tuple(stored)))
        written_s = time.process_time() - began
        began = time.process_time()
        read_registry(file)
        return [f"{written_s:.2f}", f"{time.process_time() - began:.2f}", f"{file.stat().st_size / 1e6:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--tenants", type=int, nargs="+", default=[1000, 10_000, 100_000])
    arguments = parser.parse_args()
    header = ("groups", "directory, us a call", "processors for it", "its answers, MB/s", "choice of a router, us")
    rows = [[str(groups), *directory_row(groups), *choice_row(groups)] for groups in arguments.groups]
    print(plain_table("Control plane by target groups, a router each", header, rows), flush=True)
    rows = [[str(tenants), *registry_row(tenants)] for tenants in arguments.tenants]
    print(plain_table("Registry of tenants", ("tenants", "write, s", "read, s", "MB"), rows))


if __name__ == "__main__":
    main()
