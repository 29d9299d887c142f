"""Requests within their objectives a second: with `router.objectives`, and in order of arrival.

    python -m tests.bench.simulate.goodput [--seconds 150] [--loads 0.8 1.0 1.5 3.0] [--retries 0]

One group, exact; single requests of eight tenants by Zipf's law, half of them batch, in bursts (gamma gaps with a
coefficient of variation of 2). The objectives are counted in both runs, and only the second router knows them. Capacity
is what 64 clients get that send a request as soon as they have an answer. Tokens are those that the group has emitted,
whatever became of their requests. Ends with status 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from cluster.cli.table import plain_table
from cluster.config import ClusterConfig
from cluster.simulate.exact_group import ExactGroup
from cluster.simulate.options import SimulationOptions
from cluster.simulate.simulation import Simulation

OBJECTIVES: dict[str, Any] = {"interactive": {"ttft_s": 1.0, "tpot_s": 0.1}, "batch": {"ttft_s": 30.0}}
BARS = {0.8: 1.0, 1.0: 1.15, 1.5: 1.3, 3.0: 1.3}
LEAST_TOKENS = 0.97
_WARM_UP = 0.2  # of the time

Figures = dict[str, float]


def config_of(has_objectives: bool) -> ClusterConfig:
    router = {"objectives": OBJECTIVES} if has_objectives else {}
    return ClusterConfig.model_validate({"target": {"groups": 1}, "draft": {"model": "none"}, "router": router})


def options_of(seconds: float, seed: int, **traffic: Any) -> SimulationOptions:
    return SimulationOptions.model_validate(
        {
            "seconds": seconds,
            "warm_up_s": _WARM_UP * seconds,
            "seed": seed,
            "objectives": OBJECTIVES,
            "traffic": {"turns": 1.0, "arrivals": "gamma", "batch_share": 0.5, **traffic},
        }
    )


def run(config: ClusterConfig, options: SimulationOptions) -> Figures:
    simulation = Simulation(config, options)
    report = simulation.run()
    (group,) = simulation.cluster.groups.values()
    assert isinstance(group, ExactGroup)
    seconds = options.seconds - options.warm_up_s
    counted = [record for record in report.records if record.arrived >= options.warm_up_s]
    figures = {"goodput": report.figures["goodput_per_s"], "tokens": group.counts.tokens / options.seconds}
    for kind in ("interactive", "batch"):
        own = [record for record in counted if record.service_class == kind]
        answered = [record for record in own if record.outcome == "answered"]
        figures[f"{kind} good"] = sum(record.is_good(options.objectives) for record in own) / seconds
        figures[f"{kind} answered"] = len(answered) / seconds
        waits = [record.ttft_s for record in answered] or [0.0]
        figures[f"{kind} ttft p50"], figures[f"{kind} ttft p99"] = np.percentile(waits, [50, 99]).tolist()
        figures[f"{kind} refusals"] = sum(record.refusals for record in own) / seconds
    figures["wall_s"] = report.figures["wall_s"]
    return figures


def capacity(seconds: float, seed: int) -> float:
    options = options_of(seconds, seed, clients=64)
    report = Simulation(config_of(False), options).run()
    ended = sum(record.outcome == "answered" and record.ended_at >= options.warm_up_s for record in report.records)
    return ended / (seconds - options.warm_up_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--loads", type=float, nargs="+", default=list(BARS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--retries", type=int, default=0, help="of a refused request; its times count from the first")
    arguments = parser.parse_args()
    most = capacity(arguments.seconds / 2, arguments.seed)
    print(f"capacity: {most:.2f} requests a second", flush=True)
    missed = []
    for load in arguments.loads:
        traffic = {"conversations_per_s": load * most, "retries": arguments.retries}
        options = options_of(arguments.seconds, arguments.seed, **traffic)
        before, after = (run(config_of(has_objectives), options) for has_objectives in (False, True))
        rows = [(name, f"{before[name]:.2f}", f"{after[name]:.2f}") for name in before]
        print(plain_table(f"\n{load:g} times capacity", ("figure", "by arrival", "by objectives"), rows))
        goodput, tokens = after["goodput"] / before["goodput"], after["tokens"] / before["tokens"]
        bar = BARS.get(load)
        print(f"goodput x {goodput:.2f} (bar: {bar}), tokens x {tokens:.3f} (bar: {LEAST_TOKENS})", flush=True)
        if goodput < (bar or 0.0) or tokens < LEAST_TOKENS:
            missed.append(f"{load:g}")
    if missed:
        raise SystemExit(f"below a bar at {', '.join(missed)} times capacity")


if __name__ == "__main__":
    main()
