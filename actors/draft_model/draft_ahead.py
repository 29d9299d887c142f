"""Drafting while the target verifies: trees after the likely outcomes of the draft that was sent.

An outcome is the accepted part of the draft and the target's next token (Kumar et al. 2026, "Speculative Speculative
Decoding", arXiv:2603.03251). The likeliest outcomes by the draft model's own confidence are chosen. For each of them
the tree grows that would be requested next, so that the answer is ready if the outcome occurs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from actors.draft_model.growing_tree import MAX_EXPANDED, GrowingTree, most_computed
from actors.draft_model.known_guesses import Growth, KnownGuesses, Path
from actors.draft_tree import DraftTree

_MIN_CHANCE = 0.02  # less likely outcomes do not pay
_MAX_ENDS = 16  # limit of sent nodes that are computed to find outcomes after them


class TreeShape(NamedTuple):
    """Limits of a requested tree. The next request is assumed to be the same."""

    max_nodes: int
    max_depth: int
    branch: int
    min_confidence: float = 0.0
    is_parallel: bool = False  # whether one forward gives the guesses of all depths

    def tree(self, room: int) -> GrowingTree:
        """A tree of this shape, within so many positions."""
        limit = self.max_nodes if self.is_parallel else MAX_EXPANDED
        return GrowingTree(self.max_nodes, min(self.max_depth, room), self.branch, self.min_confidence, limit)

    def most_computed(self, branch: int) -> int:
        """Limit of the nodes computed for a tree with so many guesses for each token: draft nodes, or mask tokens."""
        return most_computed(self.max_nodes, self.max_depth, 1 if self.is_parallel else branch)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Paths to compute in one forward, and the probability that they are useful."""

    chance: float
    paths: list[Path]


class DraftAhead:
    """Grows trees for the likely outcomes of one draft."""

    def __init__(self, sent: DraftTree, known: KnownGuesses, shape: TreeShape, room: int, count: int) -> None:
        """sent: the draft; known: all guesses of its sequence, to which new ones are added; room: positions left after
        the committed text; count: outcomes to draft for."""
        self._known = known
        self.shape = shape
        self._room = room
        self._count = count
        self._confidence = _confidence_by_path(sent)
        self._growths: list[tuple[float, Growth]] | None = None

    def wanted(self) -> list[Wanted]:
        """What to compute next, for the likeliest outcome first; empty if all trees are complete. The caller adds the
        results to the known guesses before the next call."""
        if self._growths is None:
            ends = self._unknown_ends()
            if ends:
                return [Wanted(self._confidence[ends[0]], ends)]
            self._growths = [(chance, self._growth(path)) for chance, path in self._outcomes()]
        grown = [Wanted(chance, growth.advance()) for chance, growth in self._growths]
        return [wanted for wanted in grown if wanted.paths]

    def _outcomes(self) -> list[tuple[float, Path]]:
        """The likeliest outcomes. Their last tokens were not sent: otherwise the target would continue behind them."""
        found = []
        for path, confidence in self._confidence.items():
            if len(path) >= self._room:
                continue
            for token, share in self._known.likeliest_after(path) or ():
                outcome = (*path, token)
                if confidence * share >= _MIN_CHANCE and outcome not in self._confidence:
                    found.append((confidence * share, outcome))
        return sorted(found, key=lambda item: -item[0])[: self._count]

    def _unknown_ends(self) -> list[Path]:
        """Sent nodes without guesses, after which there may be a likelier outcome than those known so far."""
        outcomes = self._outcomes()
        bar = outcomes[-1][0] if len(outcomes) >= self._count else _MIN_CHANCE
        ends = [
            path
            for path, confidence in self._confidence.items()
            if confidence >= bar and len(path) <= self._room and self._known.likeliest_after(path) is None
        ]
        return sorted(ends, key=lambda path: -self._confidence[path])[:_MAX_ENDS]

    def _growth(self, outcome: Path) -> Growth:
        return Growth(self.shape.tree(self._room - len(outcome) + 1), self._known, outcome)


def _confidence_by_path(tree: DraftTree) -> dict[Path, float]:
    """Confidence of each node by its path, parents first; 1 for the committed text."""
    paths: list[Path] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return {(): 1.0} | dict(zip(paths, tree.confidence.tolist(), strict=True))
