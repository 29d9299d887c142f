"""Notices when drafts of a source are suddenly accepted far less often than before.

Causes: a text that became less predictable, poisoned content (Mistletoe, arXiv 2605.14005, collapses acceptance on
purpose), or a new model behind an old cache. Load is not a cause, but shifts the numbers: with many sequences, each has
fewer nodes, which are accepted more often but bring fewer tokens. So both the accepted share of nodes and the accepted
tokens of a draft must have fallen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_BLOCK = 256  # drafts of a source that are judged together
_SETTLED = 8  # blocks after which there is something to compare with
_FALL = 0.4  # acceptance has collapsed below this share of the usual
_SLOW = 0.05  # weight of a block in the usual acceptance


class AcceptanceWatch:
    """Not thread-safe."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        count = len(self._names)
        self._sums = np.zeros((3, count), np.int64)  # drafts, nodes, accepted nodes of the block under way
        self._usual = np.zeros((2, count))  # accepted share of nodes, accepted nodes of a draft
        self._num_blocks = np.zeros(count, np.int64)
        self._collapsed = np.zeros(count, np.bool_)

    @property
    def collapsed(self) -> dict[str, bool]:
        """Whether the last block of drafts was accepted far less often than those before, by source name."""
        return dict(zip(self._names, self._collapsed.tolist(), strict=True))

    def forget(self, source: int) -> None:
        """Drop what is usual for a source: the model behind it is another one."""
        self._sums[:, source] = 0
        self._usual[:, source] = 0.0
        self._num_blocks[source] = 0
        self._collapsed[source] = False

    def observe(self, verified: npt.NDArray[np.int32], accepted: npt.NDArray[np.int32]) -> None:
        """Nodes that a round verified and accepted, shape [entries, sources]."""
        self._sums[0] += np.count_nonzero(verified, axis=0)
        self._sums[1] += verified.sum(axis=0)
        self._sums[2] += accepted.sum(axis=0)
        if self._sums[0].max(initial=0) >= _BLOCK:
            for source in np.flatnonzero(self._sums[0] >= _BLOCK).tolist():
                self._end_block(source)

    def _end_block(self, source: int) -> None:
        drafts, nodes, accepted = self._sums[:, source].tolist()
        self._sums[:, source] = 0
        now = np.array([accepted / nodes, accepted / drafts])
        count = int(self._num_blocks[source])
        self._collapsed[source] = count >= _SETTLED and bool((now < _FALL * self._usual[:, source]).all())
        # Blocks that have collapsed count as well: what lasts becomes usual in the end, and the alarm stops.
        self._usual[:, source] += max(_SLOW, 1 / (count + 1)) * (now - self._usual[:, source])
        self._num_blocks[source] = count + 1
