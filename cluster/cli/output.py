"""How commands print columns, JSON, sizes and lengths of time (90s, 30m, 24h, 7d)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def print_columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Aligned columns; cells may have several lines. As wide as the terminal, or 160 characters in a pipe."""
    table = Table(*header, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console(width=None if Console().is_terminal else 160, soft_wrap=True).print(table)


def print_json(result: Any) -> None:
    """result: a record, several, or a dictionary."""
    typer.echo(json.dumps(result, indent=2, default=asdict))


def shown_size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def parsed_seconds(text: str) -> int | None:
    """None if the text is not such a length."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    return None if match is None else int(match[1]) * _SECONDS[match[2]]


def shown_seconds(seconds: int) -> str:
    """In the largest unit with a value of at least 2; never below 0."""
    for unit in "dhm":
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds // _SECONDS[unit]} {unit}"
    return f"{max(0, seconds)} s"
