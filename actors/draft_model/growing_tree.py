"""A draft tree while it grows: decides which nodes to compute next, and which to send in the end."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences

import numpy as np

from actors.draft_tree import DraftTree

ROOT = -1

MAX_EXPANDED = 4  # nodes computed in one forward: so few rows take hardly longer than one


def most_computed(max_nodes: int, max_depth: int, branch: int) -> int:
    """Limit of the nodes of a `GrowingTree` that are computed."""
    return max(0, min(max_depth, max_nodes) - 1) * (1 if branch == 1 else MAX_EXPANDED)


class GrowingTree:
    """Nodes in order of creation, so parents come before children.

    A step computes some nodes (`expandable`) and adds guesses below each of them (`add`). Only the `max_nodes` most
    probable nodes come out in the end, and no child is more probable than its parent, so nodes are computed in order of
    their probability.
    """

    def __init__(
        self,
        max_nodes: int,
        max_depth: int,
        branch: int,
        min_confidence: float = 0.0,
        max_expanded: int = MAX_EXPANDED,
    ) -> None:
        """max_nodes: limit of the final tree; max_depth: limit of steps, hence of a path's length; branch: guesses
        below a node, 1 for a chain; min_confidence: of nodes that are computed, except the root; max_expanded: nodes
        of a step."""
        self._max_expanded = max_expanded
        self.branch = branch
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._min_confidence = min_confidence
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._confidence: list[float] = []
        self._computed: set[int] = set()
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def expandable(self) -> list[int]:
        """Nodes to compute in the next step: [ROOT] first, then the most probable ones; empty when done."""
        if self._num_steps >= self._max_depth or self._max_nodes == 0:
            return []
        if self._num_steps == 0:
            return [ROOT]
        # A child of the last of the best nodes would have no room.
        wanted = [node for node in self._best()[: self._max_nodes - 1] if node not in self._computed]
        return [node for node in wanted if self._confidence[node] >= self._min_confidence][: self._max_expanded]

    def begin_step(self, nodes: Iterable[int]) -> None:
        """Record that the step which computes `nodes`, from `expandable`, has been made."""
        self._num_steps += 1
        self._computed.update(nodes)

    def add(self, parent: int, token: int, share: float) -> None:
        """Add a guess below a node. share: its probability given that the parent is right."""
        before = self.confidence(parent)
        self._tokens.append(token)
        self._parents.append(parent)
        self._confidence.append(min(before, before * share))

    def confidence(self, node: int) -> float:
        """Probability of the path to a node; 1 for the root."""
        return 1.0 if node == ROOT else self._confidence[node]

    def path(self, node: int) -> list[int]:
        """Tokens from the root's child to the node."""
        tokens = []
        while node != ROOT:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        return tokens[::-1]

    def finished(self) -> DraftTree:
        """The best max_nodes nodes, most probable first."""
        nodes = self._best()[: self._max_nodes]
        confidence = np.asarray([self._confidence[node] for node in nodes], dtype=np.float32)
        return DraftTree(*self._part(nodes), confidence)

    def _best(self) -> list[int]:
        # Stable: a parent stays before an equally probable child.
        return sorted(range(len(self)), key=lambda node: -self._confidence[node])

    def _part(self, nodes: Sequences[int]) -> tuple[np.ndarray, np.ndarray]:
        index = {node: place for place, node in enumerate(nodes)} | {ROOT: ROOT}
        tokens = np.asarray([self._tokens[node] for node in nodes], dtype=np.int32)
        return tokens, np.asarray([index[self._parents[node]] for node in nodes], dtype=np.int32)
