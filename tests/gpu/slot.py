"""Measures what tells most about Paceline on one GPU, in parts of at most ten minutes each.

    python3 tests/gpu/slot.py --part 1 [--out DIR] [--dry] [--only NAME]

Needs torch with CUDA, transformers, Triton, numba, msgspec and pydantic, part 3 also pyzmq, redis, zstandard,
cryptography and prometheus-client, and part 4 llguidance, opentelemetry-sdk and the demo's model in $PACELINE_HOME. No
Ray and no network; other models are made on the device. --dry runs every experiment with tiny shapes, or the demo's
model, on the CPU, where Triton's interpreter runs the kernels.

Results are written after every row, as JSON, so that a run that is stopped keeps what it has measured. A part ends at
its deadline, within a row if need be; tables of all rows come last.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_RESULTS = Path(__file__).parent / "results"
_PART_S = 530.0  # a call of the machine may take ten minutes, the start of Python and of the device included

Row = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """`name` is that of a module in `experiments` with a function `measure`, or of one of its functions."""

    name: str
    budget_s: float  # after it, no further row is begun

    def rows(self, setting: Any) -> Iterator[Row]:
        module, _, function = self.name.partition(".")
        measure: Callable[[Any], Iterator[Row]] = getattr(
            importlib.import_module(f"tests.gpu.experiments.{module}"), function or "measure"
        )
        return measure(setting)


PARTS: dict[int, list[Experiment]] = {
    1: [
        Experiment("machine", 30),
        Experiment("lossless", 80),
        Experiment("built", 60),
        Experiment("rounds", 140),
        Experiment("rounds.growing", 50),
        Experiment("products", 90),
        Experiment("attention", 100),
        Experiment("attention.prompts", 30),
    ],
    2: [
        Experiment("graphs", 240),
        Experiment("graphs.quantized", 60),
        Experiment("sampling", 50),
        Experiment("bitwise", 40),
        Experiment("shards", 120),
        Experiment("drafting", 60),
    ],
    3: [
        Experiment("whole_path", 420),
        Experiment("moves", 30),
    ],
    4: [
        Experiment("demo", 500),
    ],
}


class OutOfTime(BaseException):
    """The part's deadline has come. No error that code on the way would take for its own."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the body after so many seconds. For the main thread; a call into the device ends first."""

    def end(number: int, frame: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def run_part(part: int, setting: Any, path: Path, only: str | None = None, seconds: float = _PART_S) -> dict[str, Any]:
    """All experiments of a part. One that fails is recorded with its error, and the next goes on; what the deadline
    cuts or leaves out is recorded as cut."""
    chosen = [experiment for experiment in PARTS[part] if only is None or experiment.name.startswith(only)]
    done: dict[str, Any] = {"part": part, "dry": setting.is_dry, "experiments": {}}
    try:
        with deadline(seconds):
            for experiment in chosen:
                _run(experiment, setting, path, done)
    except OutOfTime:
        for experiment in chosen:
            record = done["experiments"].setdefault(experiment.name, {"rows": []})
            if "seconds" not in record:
                record["cut"] = f"the part's {seconds:.0f} s are over"
                print(f"{experiment.name}: {record['cut']}", flush=True)
        write(path, done)
    return done


def _run(experiment: Experiment, setting: Any, path: Path, done: dict[str, Any]) -> None:
    record: dict[str, Any] = {"rows": []}
    done["experiments"][experiment.name] = record
    started = time.monotonic()
    print(f"\n## {experiment.name}", flush=True)
    try:
        for row in experiment.rows(setting):
            record["rows"].append(row)
            print("  ".join(f"{name} {_text(value)}" for name, value in row.items()), flush=True)
            write(path, done)
            if time.monotonic() - started > experiment.budget_s:
                record["cut"] = f"after {experiment.budget_s:.0f} s"
                print(record["cut"], flush=True)
                break
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    record["seconds"] = round(time.monotonic() - started, 1)
    setting.release()
    write(path, done)


def tables(done: dict[str, Any]) -> str:
    """The rows of each experiment in Markdown."""
    lines: list[str] = []
    for name, record in done["experiments"].items():
        lines += ["", f"### {name}" + (f" ({record['cut']})" if "cut" in record else ""), ""]
        columns = list(dict.fromkeys(column for row in record["rows"] for column in row))
        if columns:
            lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [
            f"| {' | '.join(_text(row[column]) if column in row else '' for column in columns)} |"
            for row in record["rows"]
        ]
        if "error" in record:
            lines += ["", record["error"]]
    return "\n".join(lines)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(path: Path, done: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", type=int, choices=sorted(PARTS), required=True)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or _RESULTS))
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--only", help="the experiments whose names begin so")
    given = parser.parse_args()
    if given.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    from tests.gpu.experiments.setting import Setting

    name = f"part{given.part}{'-dry' if given.dry else ''}.json"
    done = run_part(given.part, Setting(given.dry), given.out / name, given.only)
    print(tables(done))
    failed = [name for name, record in done["experiments"].items() if "error" in record]
    print(f"\n{given.out / name}: {len(done['experiments'])} experiments, {len(failed)} failed {' '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
