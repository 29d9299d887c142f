"""The window of lookahead decoding: guesses far ahead, improved by each forward.

Fu et al. 2024, arXiv:2402.02057, in the form that Ouroboros (Zhao et al. 2024, arXiv:2402.13720) runs on a draft model.
"""

from __future__ import annotations

import numpy as np

from actors.lookahead.phrase_pool import Phrase
from actors.lookahead.token_trie import TokenTrie

MAX_LOOKAHEAD_LEVEL = 16


class LookaheadWindow:
    """One sequence's window: `width` columns, and `level` - 1 rows once it is full.

    Row 0 is a chain after the last token. Column 0 is a chain below the last token, column i below token i - 1 of row
    0, each with its tokens of the further rows. So the window is a tree, and the model's predictions at the ends of
    the columns are the next row. A row starts one position after the row above.

    At first there is one row of tokens drawn from the text; `level` - 2 forwards fill the others. A full column with
    the prediction at its end is a phrase of `level` - 1 tokens. Only the phrase of column 0 may not match its key: that
    column started below a guess of what is now the last token.
    """

    def __init__(self, width: int, level: int, text: np.ndarray, seed: int) -> None:
        """width: at least 1; level: at least 2; text: int32 [n], n >= 1; row 0 is drawn from it by `seed`."""
        self._level = level
        # Every forward removes a column until the window is full.
        drawn = np.random.default_rng(seed).choice(text, width + level - 3)
        self._base: list[int] = drawn.tolist()
        self._rows: list[list[int]] = []  # those below row 0, each of len(_base) + 1 tokens

    @staticmethod
    def most_nodes(width: int, level: int) -> int:
        """Limit of a window's nodes."""
        columns = [(width + level - 2 - rows, rows) for rows in range(level - 1)]
        return max(count - 1 + count * rows for count, rows in columns)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return len(self._base) + len(self._rows)

    @property
    def is_full(self) -> bool:
        return len(self._rows) == self._level - 2

    def add_to(self, trie: TokenTrie, root: int) -> list[int]:
        """Add the window below `root`, the last token. Returns the nodes at which its columns end."""
        heads = [root, *trie.add(root, self._base)]
        columns = zip(*self._rows, strict=True) if self._rows else [()] * len(heads)
        return [trie.add(head, column)[-1] if column else head for head, column in zip(heads, columns, strict=True)]

    def advance(self, last_token: int, behind: list[int]) -> list[tuple[int, Phrase]]:
        """Append the model's likeliest token to each column. Returns phrases with the tokens they follow.

        last_token: the token of the node that the window was added below.
        """
        rows = [*self._rows, behind]
        if not self.is_full:
            # The text has grown, so its last position is no longer ahead.
            self._base, self._rows = self._base[1:], [row[1:] for row in rows]
            return []
        keys = [last_token, *self._base]
        self._base, self._rows = rows[0][1:], rows[1:]
        return list(zip(keys, zip(*rows, strict=True), strict=True))
