"""Runs real clients against a served model, and prints what each of them can do.

python -m tests.clients UV_VERSION MODEL_DIRECTORY [--write docs/clients.md] [client ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.clients.environments import REPOSITORY, all_clients
from tests.clients.running import Result, run_client
from tests.clients.serve import serving
from tests.clients.table import table_of, with_table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("uv_version")
    parser.add_argument("model_directory", type=Path)
    parser.add_argument("--write", type=Path, help="a page whose table is renewed")
    parser.add_argument("clients", nargs="*", help="by default all")
    arguments = parser.parse_args()
    known = {client.name: client for client in all_clients()}
    chosen = [known[name] for name in arguments.clients or known]
    logs = REPOSITORY / "build" / "clients" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for client in chosen:
        try:
            client.make(arguments.uv_version)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            print(f"{client.name}: no environment: {error}", file=sys.stderr)
            return 1
    with serving(arguments.model_directory) as served:
        for client in chosen:
            result = run_client(client, served, logs / f"{client.name}.txt")
            failed = {name: error for name, error in result.errors.items() if error} or (
                {} if result.errors else {"report": "none"}
            )
            print(f"{client.name}: {result.seconds:.1f} s, {len(result.errors) - len(failed)} abilities", flush=True)
            for name, error in failed.items():
                print(f"  {name}: {error[:300]} (see {result.log})", flush=True)
            results.append(result)
    table = table_of(results)
    print(table)
    if arguments.write is not None:
        arguments.write.write_text(with_table(arguments.write.read_text(), table))
    return int(any(result.has_failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
