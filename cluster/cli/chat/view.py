"""Writes a conversation: answers to standard output, with a colour for every source of tokens, all else to standard
error."""

from __future__ import annotations

import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.text import Text

from actors.printable import printable
from cluster.cli.chat.backend import AnswerPart, AnswerTotals, Span
from cluster.router.trace import format_trace

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
    return "default" if source is None else _STYLES.get(source, "bright_magenta")


@dataclass(slots=True)
class Turn:
    """An answer and its times in seconds since the question. totals None: it was stopped."""

    text: str = ""
    first_s: float = 0.0  # arrival of the first tokens
    first_tokens: int = 0  # how many those were
    last_s: float = 0.0
    verified: Counter[str] = field(default_factory=Counter)  # draft tokens, by source
    num_rounds: int = 0
    totals: AnswerTotals | None = None

    def add(self, part: AnswerPart, seconds: float) -> None:
        if part.spans or part.num_tokens:
            self.last_s = seconds
            if not self.first_tokens:
                self.first_s, self.first_tokens = seconds, part.num_tokens or 1
        self.text += "".join(span.text for span in part.spans)
        self.totals = part.totals
        self.num_rounds += len(part.rounds)
        for trace in part.rounds:
            self.verified.update(trace.verified)

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first ones: reading the prompt, which drafts cannot speed up, is left out."""
        num_tokens = self.totals.num_tokens if self.totals is not None else 0
        later, seconds = num_tokens - self.first_tokens, self.last_s - self.first_s
        if later > 0 and seconds > 0:
            return later / seconds
        return num_tokens / self.last_s if self.last_s > 0 else 0.0


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
            self._err.print(
                Text("tokens by ").append_text(Text(" ").join(Text(name, style_of(name)) for name in names))
            )

    def rounds(self, part: AnswerPart, last: int, text_of: Callable[[int], str]) -> None:
        """The step trace: a line a round and, below it, what was emitted in its sources' colours and what was rejected.
        last: number of the last round; text_of: the text of a token id."""
        for number, trace in enumerate(part.rounds, last - len(part.rounds) + 1):
            spans = part.spans if trace is part.rounds[-1] else ()
            self._err.print(Text(format_trace(trace, number), "dim"))
            tokens = [Text(f"{span.text!r} {span.source}", style_of(span.source)) for span in spans]
            tokens += [Text(f"not {text_of(token_id)!r}", "red strike") for token_id in trace.rejected]
            self._err.print(Text("  ").append_text(Text(", ").join(tokens)))


def format_stats(turn: Turn) -> str:
    """Figures of a finished turn in one line."""
    totals = turn.totals
    assert totals is not None
    parts = [
        f"{_count(totals.num_tokens, 'token')} in {_count(totals.rounds, 'round')}, "
        f"{totals.num_tokens / max(1, totals.rounds):.2f} a round"
    ]
    if totals.draft_tokens:
        accepted = sum(totals.accepted.values())
        share = f"{accepted / totals.draft_tokens:.0%}"
        counts = [
            f"{name} {totals.accepted.get(name, 0)}" + (f" of {turn.verified[name]}" if name in turn.verified else "")
            for name in dict.fromkeys((*totals.accepted, *turn.verified))
        ]
        sources = f" ({', '.join(counts)})" if counts else ""
        parts.append(f"accepted {accepted} of {totals.draft_tokens} draft tokens, {share}{sources}")
    else:
        parts.append("no draft tokens")
    parts.append(f"{turn.decode_rate:.1f} tokens/s, the first after {turn.first_s:.2f} s")
    if totals.finish_reason == "length":
        parts.append("cut at the length limit")
    return " | ".join(parts)


def format_comparison(turn: Turn, plain: Turn, is_coupled: bool) -> str:
    """The turn with drafts against plain decoding. is_coupled: their texts should be the same."""
    fast, slow = turn.decode_rate, plain.decode_rate
    line = f"with drafts {fast:.1f} tokens/s, plain decoding {slow:.1f} tokens/s"
    if slow > 0:
        line += f": {fast / slow:.2f} times as fast"
    if turn.text == plain.text:
        return f"{line} | the texts are equal"
    pairs = enumerate(zip(turn.text, plain.text, strict=False), 1)
    place = next((i for i, (one, other) in pairs if one != other), min(len(turn.text), len(plain.text)) + 1)
    reason = "rounding has turned a near-tie, which --exact bitwise (target.exact of a server) rules out"
    if not is_coupled:
        reason = "with --acceptance rejection only how likely each text is stays the same"
    return f"{line} | the texts differ from character {place} on: {reason}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
