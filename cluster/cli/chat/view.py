"""Writes a conversation: answers to standard output, everything else to standard error."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from actors.printable import printable
from cluster.cli.chat.sources import REJECTED_STYLE, Span, legend, style_of
from cluster.router.trace import RoundTrace, format_trace


def make_console(file: TextIO) -> Console:
    """Without colour in a pipe and under NO_COLOR: no escape codes at all, not even bold ones. What the file's encoding
    does not have is replaced."""
    if isinstance(file, io.TextIOWrapper) and file.errors != "backslashreplace":
        file.reconfigure(errors="replace")
    if os.environ.get("NO_COLOR"):
        return Console(file=file, color_system=None, highlight=False, soft_wrap=True)
    return Console(file=file, highlight=False, soft_wrap=True)


class View:
    def __init__(self, out: Console, err: Console) -> None:
        self._out = out
        self._err = err
        self._is_mid_line = False

    def answer(self, spans: Iterable[Span]) -> None:
        """Text of an answer as it comes, every token in the colour of who proposed it."""
        for span in spans:
            if self._out.is_terminal:
                self._out.out(printable(span.text), style=style_of(span.source), end="", highlight=False)
            else:
                self._out.file.write(span.text)
            self._is_mid_line = not span.text.endswith("\n")
        self._out.file.flush()

    def end_answer(self) -> None:
        """The next thing begins on a line of its own."""
        if self._is_mid_line:
            self._out.file.write("\n") if not self._out.is_terminal else self._out.out("")
            self._out.file.flush()
        self._is_mid_line = False

    def note(self, text: str) -> None:
        self.end_answer()
        self._err.print(Text(printable(text), "dim"))

    def error(self, text: str) -> None:
        self.end_answer()
        self._err.print(Text(printable(text), "red"))

    def legend(self, sources: Iterable[str]) -> None:
        if self._out.color_system is not None:
            self._err.print(legend(sources))

    def round(self, trace: RoundTrace, number: int, spans: Sequence[Span], text_of: Callable[[int], str]) -> None:
        """One round of the step trace; below it what was emitted, in its sources' colours, and what was rejected."""
        self._err.print(Text(format_trace(trace, number), "dim"))
        tokens = [Text(f"{span.text!r} {span.source}", style_of(span.source)) for span in spans]
        tokens += [Text(f"not {text_of(token_id)!r}", REJECTED_STYLE) for token_id in trace.rejected]
        self._err.print(Text("  ").append_text(Text(", ").join(tokens)))
