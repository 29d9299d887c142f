"""Writes a conversation: answers to standard output, a colour for everybody who proposes tokens; everything else to
standard error."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO
from zlib import crc32

from rich.console import Console
from rich.text import Text

from actors.printable import printable
from cluster.cli.chat.backend import AnswerTotals, Span, Turn
from cluster.router.trace import RoundTrace, format_trace

TARGET = "target"
REJECTED_STYLE = "red strike"

# The first beginning that fits a name counts, so the members of a family look alike. The target's own tokens are
# plain: it is what came for nothing that is to be seen.
_STYLES = (
    (TARGET, "default"),
    ("draft_model", "green"),
    ("eagle", "bright_green"),
    ("lookahead", "dark_orange"),
    ("ouroboros", "dark_orange"),
    ("prompt_lookup", "cyan"),
    ("suffix", "magenta"),
    ("ngram", "yellow"),
    ("soft_ngram", "yellow"),
    ("phrase", "yellow"),
    ("retriev", "bright_blue"),
    ("recycl", "bright_cyan"),
    ("token_recycl", "bright_cyan"),
    ("predict", "bright_yellow"),
)
_OTHER_STYLES = ("bright_magenta", "blue")


def style_of(source: str | None) -> str:
    """The same name has the same colour in every conversation."""
    if source is None:
        return "default"
    for beginning, style in _STYLES:
        if source.startswith(beginning):
            return style
    return _OTHER_STYLES[crc32(source.encode()) % len(_OTHER_STYLES)]


def legend(sources: Iterable[str]) -> Text:
    """Every name in its colour, the target first."""
    names = dict.fromkeys((TARGET, *sources))
    return Text("tokens by ").append_text(Text(" ").join(Text(name, style_of(name)) for name in names))


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


def decode_rate(turn: Turn) -> float:
    """Tokens a second after the first ones, so that reading the prompt, which drafts cannot speed up, is left out."""
    num_tokens = turn.totals.num_tokens if turn.totals is not None else 0
    later, seconds = num_tokens - turn.first_tokens, turn.last_s - turn.first_s
    if later > 0 and seconds > 0:
        return later / seconds
    return num_tokens / turn.last_s if turn.last_s > 0 else 0.0


def format_stats(totals: AnswerTotals, turn: Turn) -> str:
    rounds = max(1, totals.rounds)
    parts = [f"{_count(totals.num_tokens, 'token')} in {_count(totals.rounds, 'round')}"]
    parts[0] += f", {totals.num_tokens / rounds:.2f} a round"
    if totals.draft_tokens:
        accepted = sum(totals.accepted.values())
        share = accepted / totals.draft_tokens
        parts.append(f"accepted {accepted} of {totals.draft_tokens} draft tokens, {share:.0%}{_by_source(totals)}")
    else:
        parts.append("no draft tokens")
    parts.append(f"{decode_rate(turn):.1f} tokens/s, the first after {turn.first_s:.2f} s")
    if totals.finish_reason == "length":
        parts.append("cut at the length limit")
    return " | ".join(parts)


def format_comparison(turn: Turn, plain: Turn, *, is_coupled: bool = True) -> str:
    """The turn with drafts against plain decoding. is_coupled: their texts should be the same."""
    fast, slow, texts = decode_rate(turn), decode_rate(plain), (turn.text, plain.text)
    line = f"with drafts {fast:.1f} tokens/s, plain decoding {slow:.1f} tokens/s"
    if slow > 0:
        line += f": {fast / slow:.2f} times as fast"
    if turn.text == plain.text:
        return f"{line} | the texts are equal"
    same = next((i for i, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), min(map(len, texts)))
    reason = "rounding has turned a near-tie, which --exact bitwise (target.exact of a server) rules out"
    if not is_coupled:
        reason = "with --acceptance rejection only how likely each text is stays the same"
    return f"{line} | the texts differ from character {same + 1} on: {reason}"


def _by_source(totals: AnswerTotals) -> str:
    names = [*totals.accepted, *(name for name in totals.verified if name not in totals.accepted)]
    counts = []
    for name in names:
        count = f"{name} {totals.accepted.get(name, 0)}"
        if name in totals.verified:
            count += f" of {totals.verified[name]}"
        counts.append(count)
    return f" ({', '.join(counts)})" if counts else ""


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
