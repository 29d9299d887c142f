"""Runs seeds of small simulated clusters with random faults, and prints what did not hold.

python -m tests.bench.simulate.chaos [--first 0] [--count 10000] [--processes 2] [--json FILE]

A run with a FILE that has seeds of the same first one goes on behind them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from paceline_testing.simulated_chaos import Chaos, run_chaos

_SHOWN_EVERY = 500
_WRITTEN_EVERY = 20


class Progress:
    """What seeds have shown so far, in a file if there is one."""

    def __init__(self, first: int, file: Path | None) -> None:
        """Raises ValueError for a file of another first seed."""
        self.first = first
        self.seeds = 0
        self.seconds = 0.0
        self.totals: Counter[str] = Counter()
        self.failures: dict[str, list[str]] = {}  # by seed
        self._file = file
        if file is not None and file.exists():
            told = json.loads(file.read_text())
            if told["first"] != first:
                raise ValueError(f"{file} begins with seed {told['first']}")
            self.seeds, self.seconds, self.failures = told["seeds"], told["seconds"], told["failures"]
            self.totals.update(told["totals"])

    def add(self, chaos: Chaos) -> None:
        self.seeds += 1
        self.totals.update({f"requests_{outcome}": count for outcome, count in chaos.outcomes.items()})
        self.totals.update({f"faults_{kind}": count for kind, count in chaos.faults.items()})
        self.totals.update(
            requests=chaos.num_requests,
            faults=chaos.faults.total(),
            resumed=chaos.num_resumed,
            drafted_tokens=chaos.num_drafted,
            of_company=chaos.num_of_company,
        )
        if chaos.problems:
            self.failures[str(chaos.seed)] = chaos.problems[:3]
            print(f"seed {chaos.seed}: {'; '.join(chaos.problems[:3])}", flush=True)

    def write(self) -> None:
        if self._file is not None:
            rest = self._file.with_suffix(".new")
            rest.write_text(json.dumps(self.as_json(), indent=1))
            rest.replace(self._file)

    def as_json(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "seeds": self.seeds,
            "failed": len(self.failures),
            "seconds": round(self.seconds),
            "totals": dict(sorted(self.totals.items())),
            "failures": self.failures,
        }


@contextmanager
def _runs(seeds: range, processes: int) -> Iterator[Iterator[Chaos]]:
    if processes == 1:
        yield map(run_chaos, seeds)
        return
    with get_context("spawn").Pool(processes) as pool:
        yield pool.imap(run_chaos, seeds, chunksize=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="progress, from which another run goes on")
    arguments = parser.parse_args()
    progress = Progress(arguments.first, arguments.json)
    before, began = progress.seconds, time.perf_counter()
    seeds = range(arguments.first + progress.seeds, arguments.first + arguments.count)
    with _runs(seeds, arguments.processes) as runs:
        for chaos in runs:
            progress.add(chaos)
            progress.seconds = before + time.perf_counter() - began
            if progress.seeds % _WRITTEN_EVERY == 0:
                progress.write()
            if progress.seeds % _SHOWN_EVERY == 0:
                print(f"{progress.seconds:.0f} s, {progress.seeds} seeds, {len(progress.failures)} failed", flush=True)
    progress.write()
    print(json.dumps(progress.as_json(), indent=1))
    raise SystemExit(bool(progress.failures))


if __name__ == "__main__":
    main()
