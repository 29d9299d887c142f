"""Reads text that comes in pieces. A reading method is a generator: it yields where it needs more text, and returns
what it has read. None goes back in the text by more than a mark, so parsers take time in proportion to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

from cluster.text.stop_strings import partial_match
from cluster.text.tools.json_scanner import JsonScanner

Result = TypeVar("Result")
Steps = Generator[None, None, Result]

_MAX_SPACES = 64  # at a place inside a call
_SPACES = " \t\n\r"


class Marks:
    """Strings to look for. None is the beginning of another."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._pattern = re.compile("|".join(map(re.escape, self._marks)))
        self._longest = max(map(len, self._marks))

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def num_held(self, text: str, at: int) -> int:
        """Characters at the end of the text that may be the beginning of a mark."""
        end = text[max(at, len(text) - self._longest + 1) :]
        return max(partial_match(end, mark) for mark in self._marks)


class Reader:
    """At most one generator reads from it at a time."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._is_over = False
        self._taken: list[str] = []  # in earlier pieces
        self._taken_from = 0  # in this piece

    def add(self, text: str) -> None:
        self._taken.append(self._text[self._taken_from : self._at])
        self._text = self._text[self._at :] + text
        self._at = self._taken_from = 0

    def end(self) -> None:
        self._is_over = True

    def commit(self, unused: str = "") -> None:
        """What was read up to here has been used, but for the end of it that is given."""
        self._taken = [unused]
        self._taken_from = self._at

    def taken(self) -> str:
        """What was read since the last commit; commits it."""
        text = "".join(self._taken) + self._text[self._taken_from : self._at]
        self.commit()
        return text

    @property
    def is_exhausted(self) -> bool:
        """Whether the text has ended and all of it was read."""
        return self._is_over and self._at == len(self._text)

    def peek(self) -> Steps[str]:
        """The next character, which stays; "" at the end."""
        while self._at == len(self._text):
            if self._is_over:
                return ""
            yield
        return self._text[self._at]

    def word(self, word: str) -> Steps[bool]:
        """Whether this text comes next, which it reads. See `one_of`."""
        return (yield from self.one_of((word,))) is not None

    def one_of(self, words: Sequence[str]) -> Steps[str | None]:
        """Which of these comes next, which it reads. None is the beginning of another. If none comes, it reads nothing,
        but for the beginning of one that the end of the text cuts off."""
        while True:
            for word in words:
                if self._text.startswith(word, self._at):
                    self._at += len(word)
                    return word
            rest = self._text[self._at : self._at + max(map(len, words))]
            if not any(word.startswith(rest) for word in words):
                return None
            if self._is_over:
                self._at += len(rest)
                return None
            yield

    def spaces(self) -> Steps[None]:
        for _ in range(_MAX_SPACES):
            char = yield from self.peek()
            if not char or char not in _SPACES:
                return
            self._at += 1

    def characters(self, allowed: Collection[str], limit: int) -> Steps[str]:
        """The next characters as long as they are among those allowed; "" if more than `limit` are."""
        found: list[str] = []
        while (char := (yield from self.peek())) and char in allowed:
            if len(found) == limit:
                return ""
            found.append(char)
            self._at += 1
        return "".join(found)

    def text_until(self, marks: Marks, emit: Callable[[str], None]) -> Steps[str | None]:
        """Emits text up to the first mark, which it reads and returns, or to the end (None). Commits what it emits."""
        while True:
            found = marks.search(self._text, self._at)
            held = 0 if found or self._is_over else marks.num_held(self._text, self._at)
            end = found.start() if found else len(self._text) - held
            if end > self._at:
                emit(self._text[self._at : end])
            self._at = end
            self.commit()
            if found:
                self._at = found.end()
            if found or self._is_over:
                return found[0] if found else None
            yield

    def rest(self, emit: Callable[[str], None]) -> Steps[None]:
        """Emits all that comes."""
        while (yield from self.peek()):
            emit(self._text[self._at :])
            self._at = len(self._text)
            self.commit()

    def short_text_until(self, mark: str, limit: int) -> Steps[str | None]:
        """Text up to a mark, which it reads. None, if more than `limit` characters or the end come first."""
        found = ""
        while len(found) <= limit + len(mark):
            char = yield from self.peek()
            if not char:
                return None
            self._at += 1
            found += char
            if found.endswith(mark):
                return found[: -len(mark)]
        return None

    def json(self, emit: Callable[[str], None]) -> Steps[bool]:
        """Emits a JSON value; whether it is complete. If not, it reads up to the first character that is wrong."""
        scanner = JsonScanner()
        while not scanner.is_complete and not scanner.is_bad:
            if not (yield from self.peek()):
                scanner.end()
                return scanner.is_complete
            self._at, passed = scanner.scan(self._text, self._at)
            if passed:
                emit(passed)
        return scanner.is_complete
