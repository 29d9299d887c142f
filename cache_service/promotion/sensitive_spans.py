"""Finds the tokens of a text that must not become public: numbers, addresses, keys and secrets.

Rules over characters find spans; every token that touches one is blocked, and so are runs of rare tokens. Rules apply
to the whole text, since half a telephone number does not look like one. Each takes time linear in the text. No list of
rules finds every secret: this is one of several conditions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]

MIN_DIGITS = 4  # digits in a run, not counting separators
_KEY_CHARACTERS = 16  # letters and digits in one run
_WORD_CHARACTERS = 32  # letters alone

_DIGITS = re.compile(r"\d(?:[ \t.,:/()-]{0,2}\d)*")
_RUN = re.compile(r"\S+")
_KEY = re.compile(r"[A-Za-z0-9+/_=.~-]{16,}")
_HEX_GROUPS = re.compile(r"[0-9A-Fa-f]{1,4}(?:[:-][0-9A-Fa-f]{1,4}){3,}")
_KEY_PREFIX = re.compile(
    r"(?:sk|pk|rk|gh[oprsu]|github_pat|glpat|xox[abeprs]|AKIA|ASIA|AIza|eyJ|ya29)[A-Za-z0-9_.-]{8,}"
)
_KEY_BLOCK = re.compile(r"-----BEGIN[A-Z ]{1,64}-----")
_SECRET = re.compile(
    r"\b(?:pass(?:word|wd|phrase|code)|pwd|secret|token|credentials?|api[ _-]?key|access[ _-]?key|private[ _-]?key|pin)"
    r"\b[\"']?[ \t]{0,4}(?:[:=]|\bis\b)[ \t]{0,4}\S+",
    re.IGNORECASE,
)
_HOME = re.compile(r"(?:/home/|/Users/|\\Users\\)\S+", re.IGNORECASE)
_WHOLE = (_HEX_GROUPS, _KEY_PREFIX, _KEY_BLOCK, _SECRET, _HOME)


@dataclass(frozen=True, slots=True)
class SensitiveSpans:
    """Blocks tokens by their text.

    piece_of: the bytes of a token (UTF-8, possibly part of a character); tokens without bytes are blocked.
    is_rare: whether a token is seldom used; runs of rare_run or more are blocked.
    never: texts that must never become public, in any case.
    """

    piece_of: Callable[[int], bytes]
    is_rare: Callable[[int], bool] | None = None
    rare_run: int = 4
    never: tuple[str, ...] = ()

    def __call__(self, token_ids: Sequence[int] | npt.NDArray[np.integer]) -> BoolArray:
        """Whether each token of a text is blocked, bool [n]."""
        tokens = [int(token) for token in token_ids]
        blocked = np.zeros(len(tokens), np.bool_)
        pieces = [self.piece_of(token) for token in tokens]
        blocked |= np.array([not piece for piece in pieces], np.bool_)  # their meaning is unknown
        ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        text = b"".join(pieces).decode("utf-8", "surrogateescape")
        places = _byte_places(text)
        for begin, end in _spans(text, self.never):
            first = int(np.searchsorted(ends, places[begin], "right"))
            last = int(np.searchsorted(ends, places[end], "left"))
            blocked[first : last + 1] = True
        if self.is_rare is not None:
            _block_runs(blocked, [self.is_rare(token) for token in tokens], self.rare_run)
        return blocked


def _spans(text: str, never: Sequence[str]) -> list[tuple[int, int]]:
    """Sensitive spans as (begin, end) in characters; they may overlap."""
    spans = [m.span() for m in _DIGITS.finditer(text) if sum(map(str.isdigit, m[0])) >= MIN_DIGITS]
    spans += [m.span() for m in _RUN.finditer(text) if _is_address(m[0])]
    spans += [m.span() for m in _KEY.finditer(text) if _is_key(m[0])]
    for pattern in _WHOLE:
        spans += [m.span() for m in pattern.finditer(text)]
    for phrase in never:
        if phrase:
            spans += [m.span() for m in re.finditer(re.escape(phrase), text, re.IGNORECASE)]
    return spans


def _is_address(run: str) -> bool:
    """Whether a run is a mail or web address."""
    at = run.find("@")
    is_mail = 0 < at < len(run) - 1 and (run[at - 1].isalnum() or run[at - 1] in "._-+") and run[at + 1].isalnum()
    return is_mail or "://" in run or "www." in run.lower()


def _is_key(run: str) -> bool:
    letters, digits = sum(map(str.isalpha, run)), sum(map(str.isdigit, run))
    return (digits > 0 and letters > 0 and letters + digits >= _KEY_CHARACTERS) or letters >= _WORD_CHARACTERS


def _byte_places(text: str) -> npt.NDArray[np.int64]:
    """Byte offset of each character, and of the text's end: int64 [characters + 1]."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    widths[(points >= 0xDC80) & (points <= 0xDCFF)] = 1  # a byte that is no UTF-8
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])


def _block_runs(blocked: BoolArray, is_rare: Sequence[bool], length: int) -> None:
    begin = 0
    for place in range(len(is_rare) + 1):
        if place == len(is_rare) or not is_rare[place]:
            if place - begin >= length:
                blocked[begin:place] = True
            begin = place + 1
