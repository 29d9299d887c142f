"""Aggregated groups against exact ones under the same traffic.

    python -m tests.bench.simulate.agreement [--groups 4] [--seconds 120] [--loads 0.4 0.7 1.0]

loads: of what the groups can serve, by the rates of closed loops.
"""

from __future__ import annotations

import argparse

from cluster.cli.table import plain_table
from cluster.config import ClusterConfig
from cluster.simulate.forward_time import MeasuredTimes
from cluster.simulate.options import SimulationOptions
from cluster.simulate.simulation import Simulation, measured_rates
from cluster.simulate.texts import PhraseTexts

NAMES = (
    "requests", "tokens_per_s", "goodput_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms",
    "prefix_hit_rate", "refusals", "wall_s",
)  # fmt: skip


def scenario(rate: float, seconds: float, level: str) -> SimulationOptions:
    return SimulationOptions.model_validate(
        {
            "seconds": seconds,
            "warm_up_s": seconds / 4,
            "level": level,
            "traffic": {"conversations_per_s": rate, "arrivals": "gamma", "think_s": 5.0, "turns": 3.0},
        }
    )


def config_of(groups: int) -> ClusterConfig:
    return ClusterConfig.model_validate({"target": {"groups": groups}, "draft": {"model": "none"}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.3, 0.6, 0.9], help="conversations a second a group"
    )
    arguments = parser.parse_args()
    config = config_of(arguments.groups)
    first = scenario(1.0, arguments.seconds, "exact")
    times = MeasuredTimes(first.forward)
    rates = measured_rates(config, first, texts=PhraseTexts(0), times=times)
    for running in (1, 2, 4, 8, 16):
        seconds, tokens, rows, prefill = rates.of(running)
        print(
            f"{running} running: round {seconds * 1e3:.1f} ms, {tokens:.2f} tokens each, {rows:.0f} rows, "
            f"{running * tokens / seconds:.0f} tokens/s; {prefill} prompt rows beside them"
        )
    for rate in arguments.rates:
        found = {}
        for level in ("exact", "aggregate"):
            told = scenario(rate * arguments.groups, arguments.seconds, level)
            found[level] = Simulation(config, told, rates=rates).run().figures
        exact, fluid = found["exact"], found["aggregate"]
        rows = [
            (
                name,
                f"{exact[name]:.2f}",
                f"{fluid[name]:.2f}",
                f"{fluid[name] / exact[name] - 1:+.1%}" if exact[name] else "-",
            )
            for name in NAMES
        ]
        title = f"\n{arguments.groups} groups, {rate:g} conversations a second each"
        print(plain_table(title, ("figure", "exact", "aggregate", "difference"), rows), flush=True)


if __name__ == "__main__":
    main()
