"""What the shared cache adds to a router's rounds: without it, with a server that answers, stopped, and gone.

    python tests/bench/bench_cache_rounds.py [--batch 8] [--rounds 1500] [--repeats 3]

States take turns, each in a process of its own. Prints the wall time of the router's own part of a round in
microseconds: median, 99th percentile, greatest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import numpy as np

from cluster.cli.bench.cache_rounds import STATES, round_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--state", choices=STATES, help="measure one state here and print its figures as JSON")
    arguments = parser.parse_args()
    if arguments.state is not None:
        print(json.dumps(round_seconds(arguments.state, arguments.batch, arguments.rounds)))
        return
    seconds: dict[str, list[float]] = {state: [] for state in STATES}
    for _ in range(arguments.repeats):
        for state in STATES:
            command = [sys.executable, __file__, "--state", state]
            command += ["--batch", str(arguments.batch), "--rounds", str(arguments.rounds)]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            seconds[state] += json.loads(printed.splitlines()[-1])
    for state, values in seconds.items():
        median, high = np.percentile(values, [50, 99]) * 1e6
        print(f"{state:8} {median:6.0f} us median, {high:6.0f} us p99, {max(values) * 1e6:6.0f} us greatest")


if __name__ == "__main__":
    main()
