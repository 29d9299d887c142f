"""Progress bars on a terminal, silence in a pipe and where no escape codes are wanted."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback `(stage, done, total)` that draws one bar per stage on stderr, if that is a terminal and
    NO_COLOR is not set."""
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
        yield lambda stage, done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=max(total, 1))
            bars.update(tasks[stage], completed=done, total=max(total, 1))

        yield show


@contextlib.contextmanager
def progress_in_file(file: Path) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback `(stage, done, total)` that keeps the last word, such as `distilling, 43 %`, in a file for other
    processes, and writes every tenth to stderr, which is a log. The file is removed at the end."""
    last = ("", -1)

    def show(stage: str, done: int, total: int) -> None:
        nonlocal last
        percent = 100 * done // max(total, 1)
        if (stage, percent) == last:
            return
        told = f"{stage}, {percent} %"
        file.write_text(told, encoding="utf-8")
        if stage != last[0] or percent // 10 != last[1] // 10:
            print(told, file=sys.stderr, flush=True)
        last = (stage, percent)

    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield show
    finally:
        file.unlink(missing_ok=True)
