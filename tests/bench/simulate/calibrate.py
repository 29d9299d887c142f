"""Runs the laptop's cluster for real and simulated, and prints both and their differences.

    python -m tests.bench.simulate.calibrate ANSWERS.npz [--cycles 4] [--held] [--simulations 9] [--json FILE]

The answers come from `record_answers`. A real cluster is started, and `paceline bench serve` sends the recorded prompts
with 1, 4, 16 and 64 requests at a time, in turn, several times, each prompt once. Before, between and after the turns
the cluster's constants are measured (`constants.py`). The simulation has these constants, the same prompts in the same
order and the recorded answers, on which the real drafters draft. There is no draft model, and rounds are not sent
ahead, in both. Figures are those of all requests with the same number at a time. The simulated ones are medians of
several simulations with slightly different constants: who comes into which round changes single figures by a tenth and
more, and a real run is one of many, too.

On a machine that others load, forwards take longer at one time than at another. A second table tells what is left when
the forwards of each number at a time are simulated at the pace that the real ones had: then the model is compared, and
not the machine.

--held: the forwards of the real target last as long as a table says, longer than they take by themselves, and the
simulated ones too. So everything else is compared, on a machine whose own times would differ from run to run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np

from cluster.cli.bench.options import ServeOptions
from cluster.cli.bench.prompts import BenchPrompt
from cluster.cli.bench.serve import run_serve
from cluster.cli.bench.serve_metrics import summarise
from cluster.cli.bench.stream_client import RequestRecord
from cluster.cli.table import plain_table
from cluster.config import ClusterConfig, load_config
from cluster.simulate.conversations import Conversation
from cluster.simulate.events import Events
from cluster.simulate.forward_time import MeasuredTimes
from cluster.simulate.options import ForwardOptions, SimulationOptions
from cluster.simulate.records import figures_of
from cluster.simulate.simulation import Simulation
from cluster.simulate.texts import RecordedTexts
from cluster.simulate.traffic import Turn
from tests.bench.simulate.constants import Measured, Probe, target_row_steps
from tests.bench.simulate.real_cluster import RoundMeter, serving

CONFIG = Path("configs/laptop.yaml")
SETTINGS = ["draft.model=none", "router.send_ahead='off'"]
SHARES = {1: 0.13, 4: 0.16, 16: 0.21, 64: 0.50}  # of the prompts, by requests at a time
NAMES = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
_PACINGS = 3
_VARIED = ("gateway_request_s", "gateway_chunk_s", "hop_s", "router_round_s", "router_sequence_s", "link_s")
# Seconds by rows, 1.5 to 2.5 times as long as on the machine of docs/scale.md.
HELD = ((1, 0.04), (4, 0.06), (8, 0.09), (16, 0.15), (32, 0.23), (64, 0.4), (128, 0.75), (256, 1.4), (4096, 22.0))

Figures = dict[str, float]
Phase = tuple[int, list[int]]  # requests at a time, and which prompts


def phases_of(count: int, concurrency: Sequence[int], cycles: int) -> list[Phase]:
    """Each prompt once, in order. Raises ValueError where they are too few."""
    found, first = [], 0
    for _ in range(cycles):
        for number in concurrency:
            last = first + max(number, int(count / cycles * SHARES[number]))
            found.append((number, list(range(first, last))))
            first = last
    if first > count:
        raise ValueError(f"{cycles} cycles take {first} prompts, and there are {count}")
    return found


@dataclass(slots=True)
class RealLoad:
    """Everything that was sent with one number of requests at a time."""

    records: list[RequestRecord] = field(default_factory=list)
    seconds: float = 0.0
    rounds: Counter[str] = field(default_factory=Counter)  # of RoundMeter

    def figures(self) -> Figures:
        summary, rounds = summarise(self.records, self.seconds), self.rounds
        return {
            "tokens_per_s": summary["output_throughput"],
            "ttft_p50_ms": summary["median_ttft_ms"],
            "ttft_p99_ms": summary["p99_ttft_ms"],
            "tpot_p50_ms": summary["median_tpot_ms"],
            "tpot_p99_ms": summary["p99_tpot_ms"],
            "tokens_per_round": summary["spec_decode_tokens_per_round"],
            "rows_per_round": rounds["rows"] / rounds["rounds"],
            "rounds_per_s": rounds["rounds"] / self.seconds,
            "round_ms": rounds["target_s"] / rounds["rounds"] * 1e3,
            "router_ms": rounds["router_s"] / rounds["rounds"] * 1e3,
        }


def run_real(
    url: str, texts: RecordedTexts, phases: Sequence[Phase], probe: Probe, *, is_held: bool
) -> tuple[dict[int, Figures], list[Phase]]:
    """Also the phases with their prompts in the order in which they were sent. Measures before each cycle and after the
    last; with held forwards, before the first one only."""
    loads, sent = {concurrency: RealLoad() for concurrency, _ in phases}, []
    for concurrency, numbers in phases:
        if concurrency == phases[0][0] and not (is_held and sent):
            probe.sample()
        prompts = [BenchPrompt(str(n), "", token_ids=tuple(texts.prompts[n].tolist())) for n in numbers]
        options = ServeOptions(
            url=url, num_prompts=len(prompts), max_concurrency=concurrency, max_tokens=len(texts.answers[numbers[0]]),
            ignore_eos=True, num_warmups=0,
        )  # fmt: skip
        meter, load = RoundMeter(url), loads[concurrency]
        report = run_serve(prompts, options)
        load.rounds.update(meter.read())
        load.records += report.records["on"]
        load.seconds += report.summaries["on"]["duration"]
        sent.append((concurrency, [int(record.name) for record in report.records["on"]]))
        print(f"real, {concurrency} at a time, so far: {_shown(load.figures())}", flush=True)
    if not is_held:
        probe.sample()
    probe.sample_drafting()
    return {concurrency: load.figures() for concurrency, load in loads.items()}, sent


class PacedTimes:
    """Forward times with a factor that a phase may change."""

    def __init__(self, options: ForwardOptions) -> None:
        self._times = MeasuredTimes(options)
        self.row_steps = options.row_steps
        self.pace = 1.0
        self.spent_s, self.rounds, self.rows = 0.0, 0, 0

    def seconds(self, rows: int, sequences: int, context: int, unscored: int = 0) -> float:
        seconds = self.pace * self._times.seconds(rows, sequences, context, unscored)
        self.spent_s, self.rounds, self.rows = self.spent_s + seconds, self.rounds + 1, self.rows + rows
        return seconds


class PhasedLoad:
    """Traffic of one phase after the other, each drained before the next, as the real load is."""

    def __init__(
        self, events: Events, texts: RecordedTexts, phases: Sequence[Phase], send: Callable[[Turn], object]
    ) -> None:
        self.began: list[float] = []  # of each phase, and at last the end
        self._events, self._texts, self._send = events, texts, send
        self._phases = deque(phases)
        self._left: deque[int] = deque()
        self._num_open = 0
        events.after(0.0, self._next_phase)

    def _next_phase(self) -> None:
        self.began.append(self._events.now)
        if self._phases:
            concurrency, numbers = self._phases.popleft()
            self._left.extend(numbers)
            for _ in range(concurrency):
                self._next()

    def _next(self) -> None:
        if self._left:
            number = self._left.popleft()
            self._num_open += 1
            prompt, answer = self._texts.prompts[number], self._texts.answers[number]
            told = Conversation(number, 0, iter(()))
            self._send(Turn(told, 1, np.concatenate([prompt, answer]), len(prompt), None))

    def ended(self, turn: Turn, is_answered: bool) -> None:
        assert is_answered
        self._num_open -= 1
        if self._left:
            self._events.after(0.0, self._next)
        elif not self._num_open:  # once a phase, also where several end at the same moment
            self._events.after(0.0, self._next_phase)


def run_simulated(
    config: ClusterConfig,
    texts: RecordedTexts,
    phases: Sequence[Phase],
    measured: Measured,
    paces: Mapping[int, float] = MappingProxyType({}),
) -> dict[int, Figures]:
    """paces: of forwards in each phase, to the measured ones."""
    times = PacedTimes(measured.forward)
    options = SimulationOptions(seconds=86_400.0, costs=measured.costs, forward=measured.forward)
    loads: list[PhasedLoad] = []

    def make_load(events: Events, send: Callable[[Turn], object]) -> PhasedLoad:
        loads.append(PhasedLoad(events, texts, phases, send))
        return loads[0]

    simulation = Simulation(config, options, texts=texts, times=times, make_traffic=make_load)
    load, found = loads[0], {}
    spent: dict[int, list[tuple[float, int, int]]] = {}  # s, rounds and their rows
    for index, (concurrency, _) in enumerate(phases):
        times.pace, times.spent_s, times.rounds, times.rows = paces.get(concurrency, 1.0), 0.0, 0, 0
        while len(load.began) <= index + 1:
            simulation.events.run(simulation.events.now + 0.001)
        spent.setdefault(concurrency, []).append((times.spent_s, times.rounds, times.rows))
    spans = [(concurrency, *span) for (concurrency, _), span in zip(phases, pairwise(load.began), strict=True)]
    for concurrency, of_phases in spent.items():
        own = [(began, ended) for count, began, ended in spans if count == concurrency]
        records = [
            record for record in simulation.records if any(began <= record.arrived < ended for began, ended in own)
        ]
        seconds = sum(ended - began for began, ended in own)
        spent_s, rounds, rows = map(sum, zip(*of_phases, strict=True))
        found[concurrency] = {
            **figures_of(records, seconds, options.objectives),
            "round_ms": spent_s / rounds * 1e3,
            "rows_per_round": rows / rounds,
            "rounds_per_s": rounds / seconds,
        }
        print(f"simulated, {concurrency} at a time: {_shown(found[concurrency])}", flush=True)
    return found


def varied(measured: Measured, count: int) -> list[Measured]:
    """So many sets of constants: the measured ones, and others whose processor times and links take up to 5 % more or
    less, which decides who comes into which round."""
    drawn, found = random.Random(0), [measured]
    for _ in range(count - 1):
        costs = {name: getattr(measured.costs, name) * drawn.uniform(0.95, 1.05) for name in _VARIED}
        found.append(Measured(measured.costs.model_copy(update=costs), measured.forward))
    return found


def _shown(figures: Figures) -> str:
    return ", ".join(f"{name} {figure:.4g}" for name, figure in figures.items())


def holding_forwards() -> dict[str, str]:
    """The environment of a cluster whose forwards last as long as told."""
    folder = str(Path(__file__).parent / "held_forwards")
    return {
        "HELD_FORWARDS": json.dumps(HELD),
        "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
    }


def run_paced(
    config: ClusterConfig,
    texts: RecordedTexts,
    phases: Sequence[Phase],
    measured: Measured,
    real: dict[int, Figures],
    simulated: dict[int, Figures],
) -> dict[int, Figures]:
    """Forwards as slow as they really were, phase by phase; drafts change with them, so it takes a few runs."""
    paces = dict.fromkeys(real, 1.0)
    for _ in range(_PACINGS):
        paces = {
            count: paces[count] * figures["round_ms"] / simulated[count]["round_ms"] for count, figures in real.items()
        }
        simulated = run_simulated(config, texts, phases, measured, paces)
    print("paces: " + ", ".join(f"{count}: {pace:.2f}" for count, pace in paces.items()))
    return simulated


def differences(title: str, real: dict[int, Figures], simulated: dict[int, Figures]) -> str:
    rows = []
    for concurrency, figures in real.items():
        for name in NAMES:
            ours, told = simulated[concurrency][name], figures[name]
            rows.append((f"{concurrency} {name}", f"{told:.1f}", f"{ours:.1f}", f"{ours / told - 1.0:+.1%}"))
    return plain_table(title, ("requests, figure", "real", "simulated", "difference"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("answers", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--held", action="store_true", help="forwards last as long as a table says")
    parser.add_argument("--simulations", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--from-json", type=Path, help="real figures and constants of an earlier run: only simulate")
    arguments = parser.parse_args()
    texts = RecordedTexts(arguments.answers)
    texts.vocab_size = 49_152  # the model's
    phases = phases_of(len(texts.prompts), arguments.concurrency, arguments.cycles)
    data: dict[str, Any]
    if arguments.from_json is not None:
        data = json.loads(arguments.from_json.read_text())
        real = {int(concurrency): figures for concurrency, figures in data["real"].items()}
        measured, phases = Measured.from_json(data["constants"]), data["phases"]
    else:
        row_steps = target_row_steps(load_config(CONFIG, SETTINGS))
        load_before = os.getloadavg()
        with (
            TemporaryDirectory() as cache,  # nothing is known of earlier runs
            serving(
                CONFIG,
                [*SETTINGS, f"cache.directory={cache}"],
                Path("build/simulate/serve.log"),
                holding_forwards() if arguments.held else {},
            ) as url,
        ):
            probe = Probe(url, row_steps)
            real, phases = run_real(url, texts, phases, probe, is_held=arguments.held)
        measured = probe.samples.fit()
        if arguments.held:
            measured = Measured(measured.costs, ForwardOptions(row_times=HELD, row_steps=row_steps))
        print(measured.as_json(), flush=True)
        data = {
            "is_held": arguments.held,
            "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
            "load_average": {"before": load_before, "after": os.getloadavg()},
            "samples": asdict(probe.samples),
            "constants": measured.as_json(),
            "real": real,
            "phases": phases,
        }
        if arguments.json is not None:  # the rest takes minutes
            arguments.json.write_text(json.dumps(data, indent=1) + "\n")
    config = load_config(CONFIG, SETTINGS)
    runs = [run_simulated(config, texts, phases, one) for one in varied(measured, arguments.simulations)]
    simulated = {
        count: {name: statistics.median(run[count][name] for run in runs) for name in figures}
        for count, figures in runs[0].items()
    }
    print(differences("Real and simulated, with one set of constants", real, simulated))
    found: dict[str, Any] = {"simulated": simulated, "simulations": runs}
    if not data.get("is_held"):
        found["paced"] = run_paced(config, texts, phases, measured, real, simulated)
        title = "Real and simulated, with the forwards of each phase as slow as they were"
        print(differences(title, real, found["paced"]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**data, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
