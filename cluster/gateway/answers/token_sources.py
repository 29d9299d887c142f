"""Which drafter proposed which part of an answer's text."""

from __future__ import annotations

from collections import deque

from cluster.gateway.answers.piece import TokenSource


class TextSources:
    """Splits the text of one answer by the source of its tokens.

    Text may be shown later than its token came: a character is shown when its last token has come, and the beginning
    of a stop string is held back.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, str]] = deque()  # characters that were not shown, and their token's source

    def add(self, num_chars: int, source: str) -> None:
        """A token completed so many characters. With 0 its text counts as the next token's."""
        if num_chars:
            self._waiting.append((num_chars, source))

    def take(self, text: str) -> tuple[TokenSource, ...]:
        """The next shown text as (text, source) pairs that join to it. A token's text is one pair, unless a part of it
        was held back."""
        pairs: list[TokenSource] = []
        start = 0
        while start < len(text):
            num_chars, source = self._waiting.popleft()
            end = min(start + num_chars, len(text))
            if end - start < num_chars:
                self._waiting.appendleft((num_chars - (end - start), source))
            pairs.append((text[start:end], source))
            start = end
        return tuple(pairs)
