"""A colour for everybody who proposes tokens, and what of an answer came from whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

from rich.text import Text

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


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of an answer. source None: nobody told who proposed it."""

    text: str
    source: str | None


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


def spans_of(token_texts: Sequence[str], sources: Sequence[str], text: str) -> tuple[Span, ...]:
    """One span for each run of tokens of a source. What `text` has beyond the tokens' texts belongs to the last."""
    rest = text[sum(map(len, token_texts)) :]
    spans: list[Span] = []
    for part, source in [*zip(token_texts, sources, strict=True), (rest, sources[-1] if sources else TARGET)]:
        if not part:
            continue
        if spans and spans[-1].source == source:
            spans[-1] = Span(spans[-1].text + part, source)
        else:
            spans.append(Span(part, source))
    return tuple(spans)
