"""Kills, stops and scales the parts of a real cluster of toy models, under streams that must not notice.

python -m tests.bench.real_chaos [--seconds 600] [--groups 8] [--seed 0]

Prints what was asked, what happened and what became of it. Ends with status 1 if a request failed or was answered with
another text than without faults, or if something is left of requests that are over.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# Before Ray is imported: its processes are to run beside others as if they were alone.
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from ray import serve

from actors.workers.ray_environment import prepare_own_ray
from cluster.gateway_config import GatewayConfig
from paceline_testing.free_ports import free_ports
from paceline_testing.real_chaos import Chaos, run_chaos
from paceline_testing.served_load import Record

_SHOWN = 20  # failures
_GAPS_SHOWN = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--groups", type=int, default=8, help="target groups, each with a router; at least 2")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare_own_ray("127.0.0.1", GatewayConfig().max_body_bytes)
    ray.init(
        address="local",
        num_cpus=8 + 2 * arguments.groups,  # as far as Ray knows
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 1024 * 1024,
    )
    ports = dict(zip(("http_port", "grpc_port"), free_ports(2), strict=True))
    try:
        with tempfile.TemporaryDirectory() as directory:
            chaos = run_chaos(Path(directory), ports, arguments.groups, arguments.seconds, arguments.seed)
    finally:
        serve.shutdown()
        ray.shutdown()
    report(chaos)
    raise SystemExit(bool(chaos.failures or chaos.left_over))


def report(chaos: Chaos) -> None:
    outcomes = Counter(chaos.outcome(record) for record in chaos.records)
    print(f"requests: {len(chaos.records)} in {chaos.seconds:.0f} s")
    print(*(f"  {outcome}: {count}" for outcome, count in outcomes.most_common()), sep="\n")
    print(f"streams that went on at another router: {chaos.num_resumed}, at least")
    print(f"draft tokens from the shared cache, of routers that are left: {chaos.num_cached}")
    print(f"faults: {len(chaos.faults)}")
    print(*(f"  {kind}: {n}" for kind, n in sorted(Counter(fault.kind for fault in chaos.faults).items())), sep="\n")
    for what, times in (
        ("first part", [record.gaps_s[0] for record in chaos.whole_streams]),
        ("gaps between parts", [gap for record in chaos.whole_streams for gap in record.gaps_s[1:]]),
    ):
        print(f"{what}, s: {_quantiles(times)}")
    print(f"memory, all processes of the cluster: {chaos.most_bytes / 2**30:.1f} GiB at most")
    print(f"load average, 15 minutes: {os.getloadavg()[2]:.1f}")
    for record, began, gap_s in longest_gaps(chaos):
        print(f"gap of {gap_s:.1f} s, {record.kind}, after {began - chaos.began:.1f} s")
        print(f"  meanwhile: {_faults(chaos, began, began + gap_s)}")
    for error, count in Counter(
        _reason(record) for record in chaos.with_outcome("ended with its gateway")
    ).most_common():
        print(f"ended with its gateway, {count}: {error}")
    for record in chaos.failures[:_SHOWN]:
        print(_told(record, chaos))
    print(*(f"left over: {what}" for what in chaos.left_over), sep="\n")


def _quantiles(times: Sequence[float]) -> str:
    if not times:
        return "none"
    return ", ".join(f"p{share:g} {np.percentile(times, share):.3f}" for share in (50, 99, 99.9, 100))


def longest_gaps(chaos: Chaos) -> list[tuple[Record, float, float]]:
    """Streams by their longest gaps, with the times at which these began, and how long they were."""
    found = []
    for record in chaos.whole_streams:
        ends = record.started + np.cumsum(record.gaps_s)
        longest = int(np.argmax(record.gaps_s))
        found.append((record, float(ends[longest]) - record.gaps_s[longest], record.gaps_s[longest]))
    return sorted(found, key=lambda one: -one[2])[:_GAPS_SHOWN]


def _reason(record: Record) -> str:
    return re.sub(r"(?<=\d)\d+|[0-9a-f]{8,}", "", record.error or "")


def _faults(chaos: Chaos, began: float, ended: float) -> str:
    return ", ".join(
        f"{fault.kind} at {fault.at - chaos.began:.1f}" + (f" for {fault.seconds:.1f}" if fault.seconds else "")
        for fault in chaos.during(began, ended)
    )


def _told(record: Record, chaos: Chaos) -> str:
    span = f"{record.started - chaos.began:.1f} to {record.ended - chaos.began:.1f} s"
    meanwhile = _faults(chaos, record.started, record.ended)
    return f"FAILED {record.kind}, {span}, {len(record.gaps_s) - 1} parts: {record.error}\n  meanwhile: {meanwhile}"


if __name__ == "__main__":
    main()
