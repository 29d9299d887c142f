"""What to draft while the target verifies: the trees behind the likely outcomes of the draft that was sent.

An outcome is how far the draft is accepted and the token that the target puts behind it (Kumar et al. 2026,
"Speculative Speculative Decoding", arXiv:2603.03251). The outcomes that are likeliest by the draft model's own
confidence are taken, however they spread over lengths and tokens. Behind each of them grows the tree that would be
asked for next: if it comes to that, the answer is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.draft_model.growing_tree import GrowingTree
from actors.draft_model.known_guesses import Growth, KnownGuesses, Path
from actors.draft_tree import DraftTree

# An outcome that is less likely is not worth the rows.
_MIN_CHANCE = 0.02
# Ends of a draft that are computed to see what may come behind them.
_MAX_ENDS = 16


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What was asked for, and will be again."""

    max_nodes: int
    max_depth: int
    branch: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Paths to guess behind, in one forward, and how likely it is that they are of use."""

    chance: float
    paths: list[Path]


class DraftAhead:
    """The trees behind the likely outcomes of one draft."""

    def __init__(self, sent: DraftTree, known: KnownGuesses, shape: TreeShape, room: int, count: int) -> None:
        """sent: the draft; known: all guesses of its sequence, which grow as they are made; room: positions left
        behind the committed text; count: outcomes to draft for."""
        self._known = known
        self._shape = shape
        self._room = room
        self._count = count
        self._confidence = _confidence_by_path(sent)
        self._growths: list[tuple[float, Growth]] | None = None

    def wanted(self) -> list[Wanted]:
        """What to compute next, for the likeliest outcome first; nothing if all trees are there. What comes of it is
        put into the known guesses before the next call."""
        if self._growths is None:
            ends = self._unknown_ends()
            if ends:
                return [Wanted(self._confidence[ends[0]], ends)]
            self._growths = [(chance, self._growth(path)) for chance, path in self._outcomes()]
        grown = [Wanted(chance, growth.advance()) for chance, growth in self._growths]
        return [wanted for wanted in grown if wanted.paths]

    def _outcomes(self) -> list[tuple[float, Path]]:
        """The likeliest ones whose last token was not sent: else the target would go on with it."""
        found = []
        for path, confidence in self._confidence.items():
            if len(path) >= self._room:
                continue
            for token, share in self._known.guesses.get(path, ()):
                outcome = (*path, token)
                if confidence * share >= _MIN_CHANCE and outcome not in self._confidence:
                    found.append((confidence * share, outcome))
        return sorted(found, key=lambda item: -item[0])[: self._count]

    def _unknown_ends(self) -> list[Path]:
        """Sent nodes without a guess behind them, where there might be a likelier outcome than those known so far."""
        outcomes = self._outcomes()
        bar = outcomes[-1][0] if len(outcomes) >= self._count else _MIN_CHANCE
        ends = [
            path
            for path, confidence in self._confidence.items()
            if confidence >= bar and len(path) <= self._room and path not in self._known.guesses
        ]
        return sorted(ends, key=lambda path: -self._confidence[path])[:_MAX_ENDS]

    def _growth(self, outcome: Path) -> Growth:
        shape, room = self._shape, self._room - len(outcome) + 1
        return Growth(GrowingTree(shape.max_nodes, min(shape.max_depth, room), shape.branch), self._known, outcome)


def _confidence_by_path(tree: DraftTree) -> dict[Path, float]:
    """By node, parents before children; that of the committed text is 1."""
    paths: list[Path] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return {(): 1.0} | dict(zip(paths, tree.confidence.tolist(), strict=True))
