"""`paceline simulate`: a cluster's configuration under made-up traffic, in simulated time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from actors.errors import InvalidRequest

if TYPE_CHECKING:
    from cluster.config import ClusterConfig
    from cluster.simulate.forward_time import ForwardTimes

_UNITS = {"_ms": 1, "_s": 1, "share": 3, "rate": 3, "round": 2}  # digits of a figure by the end of its name


def simulate(
    config: Path = typer.Option(None, metavar="FILE", help="The cluster's configuration; by default all defaults."),
    overrides: list[str] = typer.Option(None, "--set", metavar="KEY=VALUE", help="Override a setting of the cluster."),
    scenario: Path = typer.Option(
        None, metavar="FILE", help="YAML with traffic, costs, forward times and objectives: see docs/scale.md."
    ),
    options: list[str] = typer.Option(
        None, "--option", metavar="KEY=VALUE", help="Override one of them, such as traffic.conversations_per_s=4."
    ),
    seconds: float = typer.Option(None, min=0.1, help="Simulated time; 120."),
    seed: int = typer.Option(None, min=0, help="Of traffic, texts and routing; 0."),
    level: Literal["exact", "aggregate"] = typer.Option(
        None, help="exact: every round by the real router; aggregate: rounds by rates that exact runs have shown."
    ),
    answers: Path = typer.Option(None, metavar="FILE", help="Recorded answers (.npz) in place of made-up texts."),
    target: str = typer.Option(None, help="With --gpus: forward times as `paceline size` estimates them."),
    gpus: str = typer.Option(None, metavar="NAME:NUMBER", help="GPUs of a target group, such as h200:4."),
    faults: int = typer.Option(0, min=0, help="Random failures during the simulation."),
    output: Literal["text", "json"] = typer.Option("text", "--format"),
) -> None:
    """Simulate a cluster under traffic and failures: throughput, latencies, goodput, draft workers, cache traffic.

    Routers, drafters, routing, admission and autoscaling are the real ones; forwards, networks and failures are
    modelled. What is modelled how: docs/scale.md.
    """
    from cluster.cli.output import print_json
    from cluster.cli.table import print_table
    from cluster.config import load_config
    from cluster.simulate.faults import random_faults
    from cluster.simulate.scenario import load_scenario
    from cluster.simulate.simulation import Simulation
    from cluster.simulate.texts import RecordedTexts

    cluster = load_config(config, overrides)
    given = {"seconds": seconds, "seed": seed, "level": level}
    told = load_scenario(scenario, options, {name: value for name, value in given.items() if value is not None})
    longest_s = told.seconds / 4
    simulation = Simulation(
        cluster,
        told,
        texts=None if answers is None else RecordedTexts(answers),
        times=_times(target, gpus, cluster),
        faults=random_faults(told.seed, faults, told.seconds, longest_s),
    )
    report = simulation.run()
    if output == "json":
        print_json(report.as_json())
    else:
        rows = [(name, f"{figure:,.{_digits(name)}f}") for name, figure in report.figures.items()]
        print_table(f"{told.seconds:g} simulated seconds, {told.level}", ("figure", "value"), rows, sys.stdout)


def _digits(name: str) -> int:
    return next((digits for end, digits in _UNITS.items() if name.endswith(end)), 0)


def _times(target: str | None, gpus: str | None, config: ClusterConfig) -> ForwardTimes | None:
    """The roofline, or None for the scenario's table. Raises InvalidRequest."""
    if (target is None) != (gpus is None):
        given, missing = ("--gpus", "--target") if target is None else ("--target", "--gpus")
        raise InvalidRequest(given, target or str(gpus), f"it takes {missing}, too")
    if target is None or gpus is None:
        return None
    from cluster.deploy.size.hardware import parse_gpus
    from cluster.deploy.size.model_shape import find_model
    from cluster.deploy.size.placed_model import PlacedModel
    from cluster.simulate.forward_time import RooflineTimes

    device, gpu, count = parse_gpus(gpus)
    shape = find_model(target, "--target")
    model = PlacedModel(shape=shape, device=device, gpu=gpu, count=count, dtype="bfloat16")
    memory = model.memory(rows=1, sequences=1, context=1)
    if not memory.fits:
        needed, has = memory.needed / 2**30, memory.available / 2**30
        limit = f"{target} needs {needed:.0f} GiB of each GPU's memory, which is {has:.0f}"
        raise InvalidRequest("--gpus", gpus, limit)
    return RooflineTimes(model)
