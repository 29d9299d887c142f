"""The log-probabilities of an answer's content, without those of thoughts, calls and marks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate

from cluster.gateway.answers.logprobs import TokenScore
from cluster.text.token_strings import TokenStrings
from cluster.text.tools.events import CallBegin, Event


class ContentScores:
    """Finds the tokens of each piece of text by their bytes, in the order of the answer."""

    def __init__(self, strings: TokenStrings) -> None:
        self._strings = strings
        self._pending: list[TokenScore] = []

    def add(self, scores: Iterable[TokenScore]) -> None:
        self._pending.extend(scores)

    def take(self, event: Event) -> list[TokenScore]:
        """Tokens whose bytes are in the event's text. Those before it are dropped: they are marks. Bytes that are no
        UTF-8 are not found as text; then all tokens so far are taken."""
        if isinstance(event, CallBegin):
            return []
        spelled = [self._strings.bytes_of(score.token_id) for score in self._pending]
        wanted = event.text.encode()
        begin = b"".join(spelled).find(wanted)
        if begin < 0:
            taken, self._pending = self._pending, []
            return taken
        ends = list(accumulate(map(len, spelled)))
        first = bisect_right(ends, begin)
        last = bisect_left(ends, begin + len(wanted)) + 1
        taken, self._pending = self._pending[first:last], self._pending[last:]
        return taken
