"""Runs seeds of small simulated clusters with random faults, and prints what did not hold.

python -m tests.bench.simulate.chaos [--first 0] [--count 10000] [--processes 2]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from multiprocessing import get_context

from paceline_testing.simulated_chaos import run_chaos

_SHOWN_EVERY = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    totals: Counter[str] = Counter()
    failed = 0
    began = time.perf_counter()
    seeds = range(arguments.first, arguments.first + arguments.count)
    with get_context("spawn").Pool(arguments.processes) as pool:
        for chaos in pool.imap(run_chaos, seeds, chunksize=10):
            totals.update(chaos.outcomes)
            totals.update(seeds=1, faults=chaos.num_faults, resumed=chaos.num_resumed, drafted_tokens=chaos.num_drafted)
            if chaos.problems:
                failed += 1
                print(f"seed {chaos.seed}: {'; '.join(chaos.problems[:3])}", flush=True)
            if totals["seeds"] % _SHOWN_EVERY == 0:
                print(f"{time.perf_counter() - began:.0f} s: {dict(totals)}, {failed} failed", flush=True)
    print(f"{dict(totals)}, {failed} seeds failed, {time.perf_counter() - began:.0f} s")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
