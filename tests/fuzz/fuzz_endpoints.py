"""Calls every endpoint of HTTP and gRPC as a hostile user would.

    python tests/fuzz/fuzz_endpoints.py --calls 20000

Bodies and messages follow the server's own schemas, with wrong types, huge numbers, deep nesting, lone surrogates,
damaged bytes and encodings, odd methods, paths, headers, framing. No answer may have a status of 500 or more (but 504
to calls that ask for little time), errors must be the API's own objects, streams must end as they should, the log must
have no error, and a plain call afterwards must be answered as before. Prints the outcomes and what broke a rule.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from paceline_testing.hostile_door import Figures, hostile_user
from paceline_testing.hostile_services import GATEWAYS


async def run(gateway: str, seed: int, count: int) -> Figures:
    with tempfile.TemporaryDirectory() as directory:
        async with hostile_user(GATEWAYS[gateway](Path(directory))) as user:
            await user.run(seed, count)
            return user.figures


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--calls", type=int, default=20_000, help="in all")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--gateways", nargs="+", choices=list(GATEWAYS), default=list(GATEWAYS))
    chosen = options.parse_args()
    has_broken = False
    for gateway in chosen.gateways:
        figures = asyncio.run(run(gateway, chosen.seed, chosen.calls // len(chosen.gateways)))
        outcomes = ", ".join(f"{outcome}: {count}" for outcome, count in sorted(figures.outcomes.items()))
        print(f"{gateway}: {figures.runs} calls, {len(figures.broken)} broke a rule; {outcomes}")
        print(f"  slowest: {figures.slowest_s:.2f} s, {figures.slowest[:300]}")
        for broken in figures.broken:
            print(broken)
        has_broken |= bool(figures.broken)
    return has_broken


if __name__ == "__main__":
    sys.exit(main())
