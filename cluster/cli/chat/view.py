"""Writes a conversation: answers to standard output, with a colour for every source of tokens, all else to standard
error."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.text import Text

from actors.printable import printable
from cluster.cli.chat.backend import AnswerTotals, Span

# The target's own tokens are plain, so that drafted ones stand out.
_STYLES = {
    "target": "default",
    "draft_model": "green",
    "eagle": "bright_green",
    "lookahead": "dark_orange",
    "ouroboros": "dark_orange",
    "prompt_lookup": "cyan",
    "suffix": "magenta",
    "ngram_table": "yellow",
    "soft_ngram": "yellow",
    "retrieval": "bright_blue",
    "token_recycling": "bright_cyan",
    "prediction": "bright_yellow",
}


def style_of(source: str | None) -> str:
    return _STYLES.get(source or "target", "bright_magenta")


def make_console(file: TextIO) -> Console:
    """No escape codes in a pipe and under NO_COLOR, where rich would keep bold and dim. Characters that the file's
    encoding lacks are replaced."""
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="replace")
    return Console(
        file=file, color_system=None if os.environ.get("NO_COLOR") else "auto", highlight=False, soft_wrap=True
    )


class View:
    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        """Standard output and error by default."""
        self._out = make_console(out or sys.stdout)
        self._err = make_console(err or sys.stderr)
        self._is_mid_line = False

    def answer(self, spans: Iterable[Span]) -> None:
        """Text of an answer; in a pipe exactly as it is."""
        for span in spans:
            if self._out.is_terminal:
                self._out.out(printable(span.text), style=style_of(span.source), end="", highlight=False)
            else:
                self._out.file.write(span.text)
            self._is_mid_line = not span.text.endswith("\n")
        self._out.file.flush()

    def end_answer(self) -> None:
        """Whatever comes next begins a line."""
        if self._is_mid_line:
            self._out.file.write("\n")
            self._out.file.flush()
        self._is_mid_line = False

    def note(self, text: str, style: str = "dim") -> None:
        self.end_answer()
        self._err.print(Text(printable(text), style))

    def legend(self, sources: Iterable[str]) -> None:
        """Every source in its colour, the target first."""
        if self._out.color_system is not None:
            names = dict.fromkeys(("target", *sources))
            self._err.print("tokens by", Text(" ").join(Text(name, style_of(name)) for name in names))


def format_figures(totals: AnswerTotals, first_s: float, last_s: float) -> str:
    """Figures of a finished turn in one line. first_s, last_s: arrival of its first and last text, in seconds since the
    question. The rate leaves out the first of several rounds, in which the prompt is read."""
    num_tokens, told = totals.num_tokens, totals.speculation
    num_rounds = told.rounds or num_tokens
    if num_rounds > 1 and last_s > first_s:
        rate = num_tokens * (1 - 1 / num_rounds) / (last_s - first_s)
    else:
        rate = num_tokens / last_s if last_s > 0 else 0.0
    in_rounds = f"{_count(num_tokens, 'token')} in {_count(told.rounds, 'round')}"
    parts = [f"{in_rounds}, {num_tokens / max(1, told.rounds):.2f} a round"]
    if told.draft_tokens:
        accepted = sum(told.accepted_tokens.values())
        sources = ", ".join(f"{name} {count}" for name, count in told.accepted_tokens.items())
        share = f"{accepted / told.draft_tokens:.0%}{sources and f' ({sources})'}"
        parts.append(f"accepted {accepted} of {told.draft_tokens} draft tokens, {share}")
    else:
        parts.append("no draft tokens")
    parts.append(f"{rate:.1f} tokens/s, the first after {first_s:.2f} s")
    if totals.finish_reason == "length":
        parts.append("cut at the length limit")
    return " | ".join(parts)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
