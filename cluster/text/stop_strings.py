"""Finds stop strings in streamed text, holding back only what may be the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The match that ends first wins; of several that end together, the longest. The cut therefore does not depend on
    how the text was split."""

    __slots__ = ("_held", "_shows_match", "_stops", "matched")

    def __init__(self, stops: Sequence[str], shows_match: bool = False) -> None:
        """shows_match: the text ends with the stop string, else before it."""
        self._stops = tuple(stops)
        self._shows_match = shows_match
        self._held = ""
        self.matched: str | None = None  # the stop string that was found

    def push(self, text: str) -> tuple[str, bool]:
        """Returns (text that is safe to show, whether a stop string was found). After a match push no more."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = self._find(text)
        if found is not None:
            start, end = found
            self._held, self.matched = "", text[start:end]
            return text[: end if self._shows_match else start], True
        keep = max(partial_match(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text held back; call at the end."""
        held, self._held = self._held, ""
        return held

    def copy(self) -> StopStrings:
        twin = StopStrings(self._stops, self._shows_match)
        twin._held = self._held
        return twin

    def _find(self, text: str) -> tuple[int, int] | None:
        """Where the match begins and ends."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        return None if best is None else (best[1], best[0])


def partial_match(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a proper beginning of the stop string."""
    position = max(0, len(text) - len(stop) + 1)
    while (position := text.find(stop[0], position)) >= 0:
        if stop.startswith(text[position:]):
            return len(text) - position
        position += 1
    return 0
