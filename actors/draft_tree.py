"""The draft tree, which every drafter proposes and the target verifies. A chain has the parents -1, 0, 1, ..."""

from __future__ import annotations

import msgspec
import numpy as np


class TopProbs(msgspec.Struct, frozen=True, array_like=True):
    """A truncated draft distribution for each node. q is *defined* as these pairs, so sending few loses nothing."""

    token_ids: np.ndarray  # int32 [n * k]
    probs: np.ndarray  # float32 [n * k], each run of k sums to 1
    k: int

    def first(self, count: int) -> TopProbs:
        """The distributions of the first `count` nodes."""
        return TopProbs(self.token_ids[: count * self.k], self.probs[: count * self.k], self.k)


class DraftTree(msgspec.Struct, frozen=True, array_like=True):
    """Guessed continuations of one sequence, in memory and on the wire.

    Invariants: parents[i] < i, so parents come before children; siblings have distinct tokens; confidence does not
    rise from parent to child. confidence[i] estimates the probability that node i is on the accepted path.

    The target computes a required node whether it pays or not, because its drafter reads the target's prediction
    there. Parents of required nodes are required. A required node with confidence 0 is no guess and does not count in
    statistics. Only drafters inside the router may require nodes; `required` has no encoding.
    """

    token_ids: np.ndarray  # int32 [n]
    parents: np.ndarray  # int32 [n]; -1: child of the root, which is the last committed token
    confidence: np.ndarray  # float32 [n], in [0, 1]
    probs: TopProbs | None = None  # draft distributions, only for acceptance == "rejection"
    required: np.ndarray | None = None  # bool [n]; None: no node is

    def __len__(self) -> int:
        return len(self.token_ids)

    @staticmethod
    def empty() -> DraftTree:
        return _EMPTY

    @staticmethod
    def chain(token_ids: np.ndarray, confidence: np.ndarray, probs: TopProbs | None = None) -> DraftTree:
        """A single path: token_ids int32 [n], confidence float32 [n] cumulative from the root."""
        count = len(token_ids)
        return DraftTree(
            np.asarray(token_ids, dtype=np.int32),
            np.arange(-1, count - 1, dtype=np.int32),
            np.asarray(confidence, dtype=np.float32),
            probs,
        )

    def first(self, count: int) -> DraftTree:
        """The tree of the first `count` nodes; views of the same arrays."""
        if count >= len(self.token_ids):
            return self
        return DraftTree(
            self.token_ids[:count],
            self.parents[:count],
            self.confidence[:count],
            probs=None if self.probs is None else self.probs.first(count),
            required=None if self.required is None else self.required[:count],
        )

    @property
    def is_chain(self) -> bool:
        """Whether each node is the child of the one before it."""
        return bool((self.parents == np.arange(-1, len(self.parents) - 1)).all())

    def is_valid(self, vocab_size: int) -> bool:
        """Whether arrays are equally long, parents come before children, siblings are distinct, tokens are in the
        vocabulary, confidence is in [0, 1], token ids and parents are signed integers, and `required`, if there is one,
        is bool [n] with parents of required nodes required. Neither `probs` nor whether confidence rises is checked."""
        token_ids, parents, confidence, required = self.token_ids, self.parents, self.confidence, self.required
        count = len(token_ids)
        if len(parents) != count or len(confidence) != count:
            return False
        if count == 0:
            return True
        if token_ids.dtype.kind != "i" or parents.dtype.kind != "i":
            return False
        if token_ids.min() < 0 or token_ids.max() >= vocab_size or parents.min() < -1:
            return False
        if (parents >= np.arange(count)).any():
            return False
        if not (confidence.min() >= 0.0 and confidence.max() <= 1.0):  # also refuses NaN
            return False
        if required is not None:
            if required.shape != (count,) or required.dtype != np.bool_:
                return False
            if (required & (parents >= 0) & ~required[parents]).any():
                return False
        edges = parents.astype(np.int64) * vocab_size + token_ids
        edges.sort()
        return not (edges[1:] == edges[:-1]).any()


_EMPTY = DraftTree(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))


def depths_of(parents: np.ndarray) -> np.ndarray:
    """Depth of every node, int32 [n]; children of the root have depth 1."""
    depths = np.empty(len(parents), dtype=np.int32)
    for index, parent in enumerate(parents):
        depths[index] = 1 if parent < 0 else depths[parent] + 1
    return depths
