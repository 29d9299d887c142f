"""One scenario at growing numbers of groups and with failures: throughput, latencies, draft workers, cache traffic.

    python -m tests.bench.simulate.curves docs/scale.json [--plot docs/scale.svg] [--groups 1 4 10 30 100 1000]

Every group has the same load and a draft worker. What the file has already is not simulated again: after a change of
code, begin another one. Exact runs end at `--exact` groups; aggregated groups go by an exact one with its share of the
traffic and with their draft workers, 16 at most. Needed are so many draft workers that they are busy for the share
`autoscaling.draft_busy_share`; exact runs with so many are made for `--needed` groups. A million tokens cost the GPUs
of groups and needed draft workers at the given price, an example.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from actors.workers.autoscaling import AutoscalingConfig
from cluster.cli.table import plain_table
from cluster.config import ClusterConfig
from cluster.simulate.faults import Fault, FaultKind
from cluster.simulate.forward_time import MeasuredTimes
from cluster.simulate.options import SimulationOptions
from cluster.simulate.records import Record, figures_of
from cluster.simulate.service_rates import ServiceRates
from cluster.simulate.simulation import Report, Simulation, measured_drafting, measured_rates
from cluster.simulate.texts import PhraseTexts

Figures = dict[str, float]

TENANTS = 100  # a group
GROUPS_A_GATEWAY = 8
MOST_WITH_OWN_NEWS = 100  # groups; beyond, gateways share what they hear
WARM_UP_S, COUNTED_S, REST_S = 30.0, 30.0, 10.0  # most of what arrives in the counted seconds ends in the rest
LEAST_GROUPS = 30  # fewer are run with several seeds
FAULT_AT, FAULT_S = 20.0, 10.0
ZONES = 4
MOST_RATE_GROUPS = (
    30  # of larger clusters, rates are those of so many; with more draft workers each sequence has its own
)
DRAFTING_SEEDS = 8
FAILURES: dict[str, FaultKind | None] = {"none": None, "1 % of groups": "group", "a zone": "zone", "the store": "store"}
WINDOWS = {
    "before": (FAULT_AT - FAULT_S, FAULT_AT),
    "during": (FAULT_AT, FAULT_AT + FAULT_S),
    "after": (FAULT_AT + FAULT_S, FAULT_AT + 2 * FAULT_S),
}


def config_of(groups: int, workers: int) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "target": {"groups": groups},
            "draft": {"model": "auto", "workers": workers, "gamma": 4},
            "gateway": {"replicas": max(2, groups // GROUPS_A_GATEWAY)},
        }
    )


def options_of(groups: int, rate: float, *, level: str, seed: int, seconds: float) -> SimulationOptions:
    """rate: conversations a second and group, of three turns each on average."""
    return SimulationOptions.model_validate(
        {
            "level": level,
            "news": "shared" if groups > MOST_WITH_OWN_NEWS else "each",
            "seed": seed,
            "seconds": seconds,
            "warm_up_s": WARM_UP_S,
            "zones": ZONES,
            "traffic": {
                "conversations_per_s": rate * groups,
                "tenants": TENANTS * groups,
            },
        }
    )


@cache
def rates_of(rate: float, groups: int) -> ServiceRates:
    options = options_of(groups, rate, level="exact", seed=0, seconds=WARM_UP_S + COUNTED_S + REST_S)
    config, times, texts = config_of(groups, groups), MeasuredTimes(options.forward), PhraseTexts(0)
    drafting = measured_drafting(config, options, texts=texts, times=times, seeds=DRAFTING_SEEDS)
    few_tenants = options.model_copy(update={"traffic": options.traffic.model_copy(update={"tenants": 8})})
    return measured_rates(config, few_tenants, texts=texts, times=times, seconds=20.0, drafting=drafting)


def simulation_of(
    groups: int, rate: float, level: str, seconds: float, *, workers: int, seed: int = 0, faults: Sequence[Fault] = ()
) -> tuple[Simulation, SimulationOptions]:
    """workers: draft workers."""
    options = options_of(groups, rate, level=level, seed=seed, seconds=seconds + REST_S)
    rates = rates_of(rate, min(groups, MOST_RATE_GROUPS)) if level == "aggregate" else None
    return Simulation(config_of(groups, workers), options, rates=rates, faults=faults), options


def within(report: Report, begin: float, end: float) -> list[Record]:
    return [record for record in report.records if begin <= record.arrived < end]


def grown(groups: int, rate: float, level: str, workers: int) -> Figures:
    """Of all seeds together."""
    records: list[Record] = []
    means: Figures = {}
    seeds = max(1, LEAST_GROUPS // groups)
    for seed in range(seeds):
        simulation, options = simulation_of(groups, rate, level, WARM_UP_S + COUNTED_S, workers=workers, seed=seed)
        report = simulation.run()
        records += within(report, WARM_UP_S, WARM_UP_S + COUNTED_S)
        means = {name: means.get(name, 0.0) + figure / seeds for name, figure in report.figures.items()}
    return means | figures_of(records, seeds * COUNTED_S, options.objectives)


def failed(groups: int, rate: float, level: str, failure: str) -> dict[str, Figures]:
    """By window: before, during and after the failure."""
    kind = FAILURES[failure]
    count = max(1, groups // 100) if kind == "group" else 1
    faults = [Fault(FAULT_AT, kind, number, FAULT_S) for number in range(count)] if kind else []
    seconds = FAULT_AT + 2 * FAULT_S
    simulation, options = simulation_of(groups, rate, level, seconds, workers=groups, faults=faults)
    totals: dict[float, Figures] = {}
    for edge in {edge for window in WINDOWS.values() for edge in window}:
        simulation.events.at(edge, lambda edge=edge: totals.update({edge: simulation.totals()}))
    report = simulation.run()
    return {
        name: figures_of(within(report, begin, end), FAULT_S, options.objectives)
        | {total: (totals[end][total] - totals[begin][total]) / FAULT_S for total in totals[begin]}
        for name, (begin, end) in WINDOWS.items()
    }


def workers_needed(busy: float) -> int:
    """busy: draft workers, as a mean over time."""
    return max(1, ceil(busy / AutoscalingConfig().draft_busy_share))


def dollars_per_million(groups: int, workers: int, tokens_per_s: float, price: float, gpus: int) -> float:
    """price: dollars an hour and GPU. gpus: of a target group; a draft worker has one."""
    return price / 3600 * (groups * gpus + workers) / tokens_per_s * 1e6


class Found:
    """Figures by what was simulated, kept in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.figures: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def get(self, name: str, simulate: Callable[[], Any]) -> Any:
        if name not in self.figures:
            self.figures[name] = simulate()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(self.figures, indent=1) + "\n")
            print(f"{name}: done", flush=True)
        return self.figures[name]


SHOWN = (
    "requests", "tokens_per_s", "goodput_per_s", "goodput_share", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms",
    "tpot_p99_ms", "prefix_hit_rate", "tokens_per_round", "draft_workers_busy", "draft_workers_needed",
    "store_written_bytes_per_s", "store_read_bytes_per_s", "store_messages_per_s", "probes_per_s",
    "busiest_gateway_share", "dollars_per_million", "wall_s",
)  # fmt: skip
SHOWN_OF_FAILURES = (
    "requests",
    "goodput_share",
    "tokens_per_s",
    "tokens_per_round",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "resumed",
    "refusals",
    "draft_workers_busy",
    "store_written_bytes_per_s",
    "store_read_bytes_per_s",
)
COMPARED = (
    "tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "prefix_hit_rate",
    "draft_workers_busy", "store_written_bytes_per_s", "store_read_bytes_per_s", "store_messages_per_s",
)  # fmt: skip


def _table(title: str, columns: dict[tuple[str, int], Figures], names: Sequence[str]) -> str:
    rows = [(name, *(_number(figures.get(name)) for figures in columns.values())) for name in names]
    return plain_table(title, ("figure", *(f"{level} {groups}" for level, groups in columns)), rows)


def _number(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:,.{3 if abs(figure) < 10 else 0}f}"


def _differences(sizes: dict[tuple[str, int], Figures]) -> str:
    both = [groups for level, groups in sizes if level == "exact" and ("aggregate", groups) in sizes]
    rows = [
        (name, *(f"{sizes['aggregate', groups][name] / sizes['exact', groups][name] - 1:+.1%}" for groups in both))
        for name in COMPARED
    ]
    return plain_table("Aggregated runs against exact ones", ("figure", *map(str, both)), rows)


def _failures(found: Found, groups: int, rate: float, level: str) -> str:
    rows = []
    for failure in FAILURES:
        windows = found.get(
            f"{level}, {groups} groups, failure of {failure}",
            lambda failure=failure: failed(groups, rate, level, failure),
        )
        rows += [
            (failure, window, *(_number(figures[name]) for name in SHOWN_OF_FAILURES))
            for window, figures in windows.items()
        ]
    return plain_table(f"{level}, {groups} groups", ("failure", "window", *SHOWN_OF_FAILURES), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON, read and written")
    parser.add_argument("--plot", type=Path, help="SVG or PNG; needs the extra `plot`")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 10, 30, 100, 1000])
    parser.add_argument("--exact", type=int, default=30, help="most groups that are simulated round by round")
    parser.add_argument("--needed", type=int, nargs="*", default=[10], help="groups of runs with the needed workers")
    parser.add_argument("--failing", type=int, nargs="*", default=[10, 100, 1000], help="groups of runs with failures")
    parser.add_argument("--failing-exact", type=int, nargs="*", default=[10], help="the same, exact ones")
    parser.add_argument("--rate", type=float, default=0.4, help="conversations a second and group")
    parser.add_argument("--price", type=float, default=2.0, help="dollars an hour and GPU")
    parser.add_argument("--gpus", type=int, default=1, help="of a target group")
    arguments = parser.parse_args()
    found, rate = Found(arguments.file), arguments.rate
    runs = [("exact", groups) for groups in arguments.groups if groups <= arguments.exact]
    runs += [("aggregate", groups) for groups in arguments.groups]
    sizes: dict[tuple[str, int], Figures] = {}
    for level, groups in runs:
        name = f"{level}, {groups} groups"
        figures = found.get(name, lambda level=level, groups=groups: grown(groups, rate, level, groups))
        sizes[level, groups] = figures | {"draft_workers_needed": workers_needed(figures["draft_workers_busy"])}
    for groups in arguments.needed:
        workers = workers_needed(sizes["exact", groups]["draft_workers_busy"])
        name = f"exact, {groups} groups, {workers} draft workers"
        figures = found.get(name, lambda groups=groups, workers=workers: grown(groups, rate, "exact", workers))
        sizes["exact, needed workers", groups] = figures | {"draft_workers_needed": workers}
    for (_, groups), figures in sizes.items():
        costs = groups, round(figures["draft_workers_needed"]), figures["tokens_per_s"]
        figures["dollars_per_million"] = dollars_per_million(*costs, arguments.price, arguments.gpus)
    print(_table("One load a group", sizes, SHOWN))
    print(_differences(sizes))
    for level, failing in (("aggregate", arguments.failing), ("exact", arguments.failing_exact)):
        for groups in failing:
            print(_failures(found, groups, rate, level))
    if arguments.plot is not None:
        from tests.bench.simulate.curves_plot import draw_curves

        draw_curves(sizes, arguments.plot)


if __name__ == "__main__":
    main()
