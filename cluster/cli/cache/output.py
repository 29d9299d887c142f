"""How `paceline cache` shows what was found and done."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer


def print_json(result: Any) -> None:
    """result: a record, several, or a dictionary."""
    if isinstance(result, list):
        shown: Any = [asdict(each) for each in result]
    else:
        shown = result if isinstance(result, dict) else asdict(result)
    typer.echo(json.dumps(shown, indent=2))


def shown_size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
