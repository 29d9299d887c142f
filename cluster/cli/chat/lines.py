"""The user's lines: with editing and history on a terminal, one after the other in a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_MAX_HISTORY = 1000


def read_lines(history: Path) -> Iterator[str]:
    """Lines until the end of input. On a terminal Ctrl-C only drops the line. Undecodable bytes become U+FFFD."""
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    try:
        import readline  # here: on some terminals it writes escape codes when it is imported
    except ImportError:  # this Python was built without
        yield from _typed_lines()
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_MAX_HISTORY)
    if os.environ.get("NO_COLOR"):
        readline.parse_and_bind("set enable-bracketed-paste off")  # it writes escape codes
    try:
        yield from _typed_lines()
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)
            readline.write_history_file(history)


def _typed_lines() -> Iterator[str]:
    out = sys.stdout if sys.stdout.isatty() else sys.stderr  # a pipe from standard output is for answers
    while True:
        try:
            with contextlib.redirect_stdout(out):
                line = input("> ")
            yield line
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\nCtrl-D ends", file=sys.stderr)
