"""Tables on standard output: as wide as the terminal, or 160 columns in a pipe."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def print_table(table: Table) -> None:
    Console(width=None if Console().is_terminal else 160, soft_wrap=True).print(table)
