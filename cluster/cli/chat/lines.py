"""The user's lines: with editing and history on a terminal, one after the other in a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_PROMPT = "> "
_MAX_HISTORY = 1000


def is_interactive() -> bool:
    return sys.stdin.isatty()


def read_lines(history: Path, completions: Sequence[str]) -> Iterator[str]:
    """Until the end of input. On a terminal Ctrl-C only drops the line. Undecodable bytes become U+FFFD."""
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    if not is_interactive():
        yield from map(without_surrogates, sys.stdin)
        return
    with _editing(history, completions):
        while True:
            try:
                line = _ask()
            except EOFError:
                print(file=sys.stderr)
                return
            except KeyboardInterrupt:
                print("\nCtrl-D ends", file=sys.stderr)
                continue
            yield without_surrogates(line)


def without_surrogates(text: str) -> str:
    """Bytes that Python could not decode and keeps as lone surrogates, which no tokenizer takes, are read as UTF-8;
    those that are none become U+FFFD. Raises UnicodeEncodeError for surrogates that stand for no byte."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _ask() -> str:
    if sys.stdout.isatty():
        return input(_PROMPT)
    print(_PROMPT, end="", file=sys.stderr, flush=True)  # standard output is for answers
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


@contextlib.contextmanager
def _editing(history: Path, completions: Sequence[str]) -> Iterator[None]:
    """Keys, history and completion of readline, where Python has it."""
    try:
        import readline
    except ImportError:
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_MAX_HISTORY)
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, state: _completion(text, state, completions))
    readline.parse_and_bind("tab: complete")
    if os.environ.get("NO_COLOR"):
        readline.parse_and_bind("set enable-bracketed-paste off")  # it writes escape codes
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)
            readline.write_history_file(history)


def _completion(text: str, state: int, completions: Sequence[str]) -> str | None:
    matching = [name for name in completions if text and name.startswith(text)]
    return matching[state] if state < len(matching) else None
