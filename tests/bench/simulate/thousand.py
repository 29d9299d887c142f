"""Many aggregated groups: what a simulation of them costs, and what they do.

    python -m tests.bench.simulate.thousand [--groups 1 10 100 1000] [--seconds 3600] [--rate 0.15] [--json FILE]

rate: conversations a second and group, of three turns each on average. Exact runs measure the rates of rounds first.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

from cluster.cli.table import plain_table
from cluster.config import ClusterConfig
from cluster.simulate.forward_time import MeasuredTimes
from cluster.simulate.options import SimulationOptions
from cluster.simulate.simulation import Simulation, measured_rates
from cluster.simulate.texts import PhraseTexts

NAMES = (
    "requests", "tokens_per_s", "goodput_share", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms",
    "prefix_hit_rate", "refusals", "probes_per_s", "busiest_gateway_share", "events", "wall_s", "cpu_s",
)  # fmt: skip


def options_of(groups: int, rate: float, seconds: float) -> SimulationOptions:
    return SimulationOptions.model_validate(
        {
            "level": "aggregate",
            "news": "shared",  # each gateway's hearing of a thousand routers would take most of the time
            "seconds": seconds,
            "warm_up_s": min(60.0, seconds / 4),
            "traffic": {
                "conversations_per_s": rate * groups,
                "arrivals": "diurnal",
                "period_s": 3600.0,
                "burstiness": 2.0,
                "tenants": 100 * groups,
                "think_s": 10.0,
            },
        }
    )


def config_of(groups: int) -> ClusterConfig:
    """A gateway for every eight groups."""
    return ClusterConfig.model_validate(
        {
            "target": {"groups": groups},
            "draft": {"model": "none"},
            "gateway": {"replicas": max(2, groups // 8)},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--rate", type=float, default=0.15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    gc.disable()  # there are no cycles: looking for them takes a sixth of the time
    first = options_of(1, 1.0, 40.0)
    one_tenant = first.model_copy(update={"traffic": first.traffic.model_copy(update={"tenants": 8})})
    times = MeasuredTimes(first.forward)
    rates = measured_rates(config_of(1), one_tenant, texts=PhraseTexts(0), times=times)
    found = {}
    for groups in arguments.groups:
        began = time.process_time()
        told = options_of(groups, arguments.rate, arguments.seconds)
        figures = Simulation(config_of(groups), told, rates=rates).run().figures
        found[groups] = {**figures, "cpu_s": time.process_time() - began}  # without the process that draws traffic
        print(f"{groups} groups: {figures['wall_s']:.0f} s", flush=True)
    rows = [(name, *(f"{figures[name]:,.2f}" for figures in found.values())) for name in NAMES]
    print(plain_table(f"{arguments.seconds:g} simulated seconds", ("figure", *map(str, found)), rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
