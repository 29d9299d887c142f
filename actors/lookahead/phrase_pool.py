"""The pool of lookahead decoding (Fu et al. 2024, arXiv:2402.02057): phrases by the token before them.

Its total size is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np

Phrase = tuple[int, ...]

_MAX_LEARNT = 1024  # limit of a text's tokens that are learnt at a time


class PhrasePool:
    """At most `per_token` phrases of `length` tokens after each token, and at most `max_phrases` in all.

    A phrase that is inserted again becomes the newest. The oldest is dropped for lack of room. Phrases are found only
    in the scope in which they were inserted. A phrase of four tokens takes about half a kilobyte.
    """

    def __init__(self, length: int, per_token: int, max_phrases: int) -> None:
        """length and max_phrases: at least 1; per_token: at least 1, or -1 for as many as max_phrases."""
        self.length = length
        self._per_token = max_phrases if per_token == -1 else per_token
        self._max_phrases = max_phrases
        self._phrases: dict[tuple[Hashable, int], dict[Phrase, None]] = {}  # oldest first
        self._ages: OrderedDict[tuple[Hashable, int, Phrase], None] = OrderedDict()  # all of them, oldest first

    def __len__(self) -> int:
        return len(self._ages)

    def newest(self, scope: Hashable, token: int, count: int) -> list[Phrase]:
        """Up to `count` phrases after a token, newest first."""
        phrases = self._phrases.get((scope, token), {})
        return [phrase for phrase, _ in zip(reversed(phrases), range(count), strict=False)]

    def insert(self, scope: Hashable, token: int, phrase: Phrase) -> None:
        """Raises ValueError for a phrase of another length."""
        if len(phrase) != self.length:
            raise ValueError(f"a phrase has {len(phrase)} tokens; those of this pool have {self.length}")
        phrases = self._phrases.setdefault((scope, token), {})
        if phrase in phrases:
            del phrases[phrase]
            self._ages.move_to_end((scope, token, phrase))
        elif len(phrases) == self._per_token:
            self._drop(scope, token, next(iter(phrases)))
        elif len(self._ages) == self._max_phrases:
            self._drop(*next(iter(self._ages)))
        # Not `phrases`, which is out of the pool when its last phrase has just been dropped.
        self._phrases.setdefault((scope, token), {})[phrase] = None
        self._ages[scope, token, phrase] = None

    def insert_runs(self, scope: Hashable, tokens: Sequence[int]) -> None:
        """Insert the `length` tokens after each token that has as many after it."""
        for end in range(self.length + 1, len(tokens) + 1):
            begin = end - self.length
            self.insert(scope, tokens[begin - 1], tuple(tokens[begin:end]))

    def insert_text(self, scope: Hashable, text: np.ndarray, num_new: int) -> None:
        """Insert the runs that end in the last `num_new` (at most 1024) tokens of a text, int32 [n]."""
        self.insert_runs(scope, text[-(min(num_new, _MAX_LEARNT) + self.length) :].tolist())

    def drop_scope(self, scope: Hashable) -> None:
        """Drop the phrases of a scope. Scans the pool: about 10 ms for 65,536 phrases."""
        for owner, token in [key for key in self._phrases if key[0] == scope]:
            for phrase in self._phrases.pop((owner, token)):
                del self._ages[owner, token, phrase]

    def _drop(self, scope: Hashable, token: int, phrase: Phrase) -> None:
        del self._ages[scope, token, phrase]
        phrases = self._phrases[scope, token]
        del phrases[phrase]
        if not phrases:
            del self._phrases[scope, token]
